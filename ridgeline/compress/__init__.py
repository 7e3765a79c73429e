"""Makers of smaller models: calibrated quantisation, written as the engine or as others read it.

pipeline.py     the loop over layers: calibrate, balance, round, store, go on
balance.py      AWQ, SmoothQuant: function-preserving rescales that make rounding cheaper
rounding.py     registry of rounders: rtn.py, gptq.py, hqq.py
rotate.py       QuaRot's R1 and R2, merged into the weights
store.py        what is finished, layer by layer, on disk
"""
