"""Chat templates of untrusted directories, rendered in a process that can be killed.

jinja2's sandbox keeps a template from reaching anything, but not from looping for ever, from
computing a power of a billion digits, or from building a text that fills the memory. The process
has limits on memory and output, and is killed when a conversation takes too long; the next one
starts a new process. Rendering costs a fraction of a millisecond more than in this process.
"""

from ridgeline.engine.tokenization.template_process.client import ProcessTemplate, RenderLimits

__all__ = ["ProcessTemplate", "RenderLimits"]
