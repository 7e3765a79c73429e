"""Result files of this and of other tools.

event_log.py          a RunTrace on disk, without loss (JSONL; event_log_parquet.py: Parquet)
vllm_result.py        the result in the keys of `vllm bench serve`
result_file.py        one result in one form, in seconds
readers.py            one reader per tool, chosen by the content of the file
comparison.py         two sides of one or several results → an outcome per metric
settings_effect.py    whether a change of settings changed anything
"""
