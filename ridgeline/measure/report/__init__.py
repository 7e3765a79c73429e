"""A run for people and for other programs.

page.py        one self-contained page (svg.py, cdf.py, pictures.py, style.css)
perfetto.py    requests and steps as a Chrome trace, for Perfetto
vllm_block.py  the console block of `vllm bench serve`
"""
