"""How a model is named on the command line, and which one is taken where none is named."""

DEFAULT_MODEL = "smollm2"
EXAMPLE_MODEL = "demo"  # for explanations, which must not download anything
MODEL_HELP = (
    "Name of a model: a directory, a .gguf file or its address, "
    "OWNER/REPO[@REVISION][:QUANTISATION] on the Hugging Face Hub, 'smollm2', 'demo', or "
    "'dummy:SHAPE' (random weights)."
)
