"""Result files, ours and those of other tools, made comparable.

base.py      what one file tells, in seconds → Result
readers.py   one reader per tool, chosen by what the file looks like
judge.py     two sides of one or several results → a judgement per metric, or why there is none
"""
