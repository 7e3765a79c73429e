"""Quantisation with calibration, and drafter training.

pipeline.py        the loop over layers: calibrate, balance, round, store
quantize_model.py  from a model and a recipe to a folder
methods/           rtn, gptq, hqq, awq and smoothquant (channel_balance), llm-int8 (outliers), qat …
formats/           numeric formats: integer lattices, K-quants, NF4, FP8
writers/           checkpoints for this engine and for others, and the store of finished layers
drafter_training/  trains Medusa and EAGLE drafters
"""
