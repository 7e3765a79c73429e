"""Results for readers and other programs.

html.py                     pages from jinja2 templates: base.html, macros.html, style.css
svg.py                      script-free drawings: scales, axes, marks
*_chart.py                  charts that several pages share
result.py                   base class of workflow results: to_dict, to_html, save
json_line.py · files.py     JSON without infinities · atomic writes
"""
