"""Makers of smaller models: calibrated quantisation, written as the engine or as others read it.

pipeline.py     the loop over layers: calibrate, balance, round, store, go on
balance.py      AWQ, SmoothQuant: function-preserving rescales that make rounding cheaper
repair.py       weights that make up for what was rounded before them
rounding.py     a product's weights by the recipe: rtn.py, gptq.py, hqq.py, outliers.py, floats.py
rotate.py       QuaRot's R1 and R2, merged into the weights
store.py        what is finished, layer by layer, on disk
"""
