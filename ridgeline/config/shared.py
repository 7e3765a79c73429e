"""Descriptions of options that several commands have: one name, one text, one meaning."""

from __future__ import annotations

from typing import Literal

from ridgeline.config.option import About
from ridgeline.config.units import (
    BYTES,
    COUNT,
    DOLLARS,
    DURATION,
    MAX_LENGTH,
    MAX_SECONDS,
    MILLISECONDS,
    NON_NEGATIVE_COUNT,
    NUMBER,
    RATE,
    SEED,
    SHARE,
    TOKENS,
    Range,
)
from ridgeline.records import Slo


def checked_slo(text: str) -> str:
    """The text of an SLO as it stands. Raises BadInput where it cannot be parsed."""
    Slo.parse(text)
    return text


DEFAULT_MODEL = "smollm2"
EXAMPLE_MODEL = "demo"  # for explanations, which must not download anything
MODEL_HELP = (
    "Name of a model: a directory, a .gguf file or its address, "
    "OWNER/REPO[@REVISION][:QUANTISATION] on the Hugging Face Hub, 'smollm2', 'demo', or "
    "'dummy:SHAPE' (random weights)."
)
SLO_TERM = r"(ttft|tpot|e2el?|error|attainment):\S+"

QuantizeMethod = Literal["rtn", "hqq", "gptq", "awq", "smoothquant", "llm-int8", "qat"]
"""How `ridgeline quantize` rounds weights."""

MODEL = About(
    MODEL_HELP,
    positional=True,
    required=True,
)
OPTIONAL_MODEL = MODEL.but(required=False, unset=DEFAULT_MODEL)
SHAPE = About(
    "Name of a published architecture, a config.json, or a model directory.",
    positional=True,
    required=True,
)
JSON = About("Print JSON instead of text.", ambient=False)
HTML = About("Write an HTML page with charts.", path="file", ambient=False)
TRACE = About("Write a Chrome trace, for Perfetto.", path="file", ambient=False)
SEED_OF_ALL = About("Seed of everything random.", unit=SEED)

WORKLOAD = About(
    "Requests to send: chat-and-code, chat, code, synthetic:input=256,output=128, synthetic-chat, "
    "rag, code-edit, long-document, batch, FILE.jsonl, or recorded traffic: sharegpt:FILE, "
    "conversations:FILE, azure:FILE, burstgpt:FILE, mooncake:FILE.",
    metavar="WORKLOAD",
)
SLO = About(
    "Latency limits in milliseconds: 'ttft:200 tpot:50 e2e:5000 error:1%'.",
    metavar="SLO",
    old_names=("goodput",),
    parse=Slo.parse,
    words=SLO_TERM,
)
SLO_TEXT = SLO.but(parse=checked_slo)
REQUEST_RATE = About(
    "Requests per second, Poisson arrivals.", unit=RATE, old_names=("rate",), since="0.2"
)
INPUT_LEN = About(
    "Prompt tokens of a request.",
    unit=TOKENS,
    range=Range(1, MAX_LENGTH),
    old_names=("random-input-len", "isl"),
    since="0.2",
)
OUTPUT_LEN = About(
    "Output tokens of a request.",
    unit=TOKENS,
    range=Range(1, MAX_LENGTH),
    old_names=("random-output-len", "osl"),
    since="0.2",
)
PREFIX_LEN = About(
    "Prompt tokens that all requests share.",
    unit=TOKENS,
    range=NON_NEGATIVE_COUNT,
    since="0.2",
)
REPLAY_SPEED = About(
    "Replay recorded arrival times, sped up by this factor.",
    metavar="FACTOR",
    unit=NUMBER,
    range=Range(0, 1e9, exclusive=True),
)
STEP_TOKENS = About("Token budget of one step.", unit=TOKENS, unset="8192; with --calibration 512")
SLOTS = About(
    "Maximum sequences running at once on a replica.",
    unit=COUNT,
    unset="256; with --calibration 64",
)
DRAFT_TOKENS = About(
    "Speculative decoding: draft tokens per sequence and step.",
    unit=TOKENS,
    range=NON_NEGATIVE_COUNT,
)
ACCEPTANCE = About("Speculative decoding: probability that a draft token is accepted.", unit=SHARE)
LOOKUP_ACCEPTANCE = ACCEPTANCE.but(
    help="Speculation by lookup: probability that a draft token is accepted.", since="0.3"
)
DRAFTER_ACCEPTANCE = LOOKUP_ACCEPTANCE.but(
    help="Speculation by a head or a draft model: probability that a draft token is accepted."
)

URL = About("Address of a running server with the OpenAI API.", metavar="URL", ambient=False)
INTERCONNECT = About(
    "Link between the devices of a node: nvlink3 to nvlink5, pcie3 to pcie5.",
    metavar="NAME",
    unset="the device's own",
    since="0.3",
)
NETWORK = About(
    "Link between nodes, one per device: ethernet-10, -25, -100, infiniband-hdr, -ndr, -xdr.",
    metavar="NAME",
    unset="400 Gbit/s",
    since="0.3",
)
EXPLAINED_MODEL = About(
    "The model for which a topic is explained. A topic of several words needs no quotes.",
    positional=True,
    unset=EXAMPLE_MODEL,
    words=r"\S+",
)
API_KEY = About("API key of the server.", metavar="KEY", env="RIDGELINE_API_KEY", ambient=False)
SERVED_MODEL_NAME = About(
    "Model to request from the server.",
    metavar="NAME",
    unset="the first it lists",
    ambient=False,
)

TOKENIZER = About(
    "With --url: model whose tokenizer counts what the server does not, counts all answers once "
    "more to compare servers, and writes token ids as text for a server that takes none.",
    metavar="MODEL",
    ambient=False,
)

ACCELERATOR = About(
    "Accelerator, by its name in the catalogue (`ridgeline predict --list-models`).",
    metavar="NAME",
    old_names=("device",),
    since="0.2",
)
SERVER_ACCELERATOR = ACCELERATOR.but(
    help="Device that the server runs on, by its name in the catalogue, to predict with.",
    unset="this machine's GPU or CPU",
    old_names=(),
    ambient=False,
    since="0.3",
)
CATALOGUE = About("TOML catalogue of accelerators to use instead of the built-in.", path="input")
CALIBRATION = About(
    "Calibration written by `ridgeline calibrate`; adds its device, this-machine.", path="input"
)
QUANTIZATION = About(
    "Weight format: float32, bfloat16, float16, fp8, fp8-block, int8, int8-wo, llm-int8, int4, "
    "int4-g64, mxfp4, nvfp4, nf4, sparse-24, sparse-24-int8, or mixed-B of B bits on average.",
    metavar="FORMAT",
    unset="as stored",
    old_names=("weight-dtype",),
    since="0.2",
)
KV_CACHE_DTYPE = About(
    "KV cache format: float32, bfloat16, float16, fp8, int8 or int4.",
    metavar="FORMAT",
    unset="as stored",
    old_names=("kv-dtype",),
    since="0.2",
)
TIER_MEMORY_BANDWIDTH = About(
    "Bytes per second between the KV cache and its memory tier.",
    unit=BYTES,
    unset="4 GB",
    since="0.3",
)
TIER_FILE_BANDWIDTH = About(
    "Bytes per second from its files.", unit=BYTES, unset="0.5 GB", since="0.3"
)
TIER_MEMORY = About("Host memory for evicted KV blocks.", unit=BYTES, unset="none", since="0.3")
TIER_FILES = About(
    "Maximum size of the files for evicted KV blocks.", unit=BYTES, unset="none", since="0.3"
)
KV_EVICTION = About(
    "Policy by which Ridgeline's engine evicts keys and values (lossy), as JSON: "
    '\'{"method": "streaming", "budget": 1024}\'.',
    unset="all are kept",
    since="0.3",
)
BATCH_WAIT = About(
    "Dynamic batching: maximum wait for a fuller batch.",
    unit=MILLISECONDS,
    unset="what the TTFT of --slo leaves at the p95, or 10",
    since="0.3",
)
MAX_LORAS = About(
    "LoRA adapters that are loaded, and used in every step.", unit=COUNT, unset="none", since="0.3"
)
MAX_LORA_RANK = About("Rank of those adapters.", unit=COUNT, since="0.3")
TENSOR_PARALLEL = About(
    "Devices that every layer is split over.", unit=COUNT, old_names=("tp",), since="0.2"
)
PIPELINE_PARALLEL = About(
    "Stages that the layers are divided into.", unit=COUNT, old_names=("pp",), since="0.2"
)
EXPERT_PARALLEL = About(
    "Devices that whole experts are spread over.", unit=COUNT, old_names=("ep",), since="0.2"
)
CONTEXT_PARALLEL = About(
    "Devices, for each one that a layer is split over, that divide the KV cache of every sequence.",
    unit=COUNT,
    since="0.3",
)
SEQUENCE_PARALLEL = About(
    "With tensor parallelism, each process or device normalises a part of a step's rows.",
    since="0.3",
)
LAYOUT = About(
    "Show what each process or device of a parallel layout holds, in place of the usual tables: "
    "'key=N' of tp, pp, ep and cp.",
    metavar="SIZES",
    since="0.3",
)
ATTENTION_DP = About(
    "Data-parallel attention groups: separate sequences, shared experts.",
    unit=COUNT,
    since="0.3",
)
MOE_TENSOR_PARALLEL = About(
    "Devices that each expert's matrices are split over.",
    unit=COUNT,
    unset="what expert parallelism leaves",
    since="0.3",
)
FURTHER_MODELS = About(
    "TOML file of [[model]] rows of further models on the same devices.", path="input", since="0.3"
)
RESPONSE_CACHE_SHARE = About(
    "Share of requests that the response cache answers without a step.", unit=SHARE, since="0.3"
)
SEMANTIC_CACHE_SHARE = About(
    "Share of requests that get the stored answer to a similar question.", unit=SHARE, since="0.3"
)
QUESTION_LEN = About(
    "With --semantic-cache-share: tokens of a question, which are embedded for every request "
    "without an exact answer.",
    unit=TOKENS,
    range=Range(1, 512),
    since="0.3",
)
PINNED_LEN = About(
    "Tokens at the start of every prompt that are a pinned prefix, as by cache_control.",
    unit=TOKENS,
    range=NON_NEGATIVE_COUNT,
    since="0.3",
)
PINNED_PREFIXES = About(
    "With --pinned-len: how many different prefixes there are.", unit=COUNT, since="0.3"
)
BACKGROUND_TOKENS = About(
    "Token budget of background (batch) requests in a step that also serves interactive requests.",
    unit=TOKENS,
    range=NON_NEGATIVE_COUNT,
    unset="what --slo leaves",
    since="0.3",
)
BATCH_SHARE = About("Share of requests that run in the background.", unit=SHARE)
OFF_PEAK = About(
    "When background requests run: 22:00-06:00, optionally @18:30 for the start time.",
    metavar="HOURS",
)
COMPLETION_WINDOW = About(
    "Background requests come from a batch store, which gives each of them this time.",
    unit=DURATION,
    range=Range(1, MAX_SECONDS),
    unset="they are routed, without a deadline",
    since="0.3",
)
BATCH_RATE = About(
    "Batch requests per second, on average, that the fleet serves in the troughs.",
    unit=RATE,
    range=Range(0, 1e9),
    since="0.3",
)
MEAN_REQUEST_RATE = About(
    "With --batch-rate: mean of the rate over a completion window, of which --request-rate is the "
    "peak.",
    unit=RATE,
    range=Range(0, 1e9),
    unset="--request-rate",
    since="0.3",
)
RESUME_REQUESTS = About(
    "Requests of a failed replica continue elsewhere behind the tokens that they have.",
    since="0.3",
)
BACKEND = About(
    "Engine whose overheads are predicted: vllm, sglang or trtllm.",
    metavar="NAME",
    unset="the mean of the three",
    since="0.3",
)
PRICE_PER_HOUR = About("Price of this machine per hour.", unit=DOLLARS)
DEVICE_PRICE = About("Price per device and hour.", unit=DOLLARS, unset="from the catalogue")
COMMITMENT = About(
    "Which of the catalogue's prices to count with: on-demand, spot, reserved-1y, reserved-3y or "
    "owned.",
    since="0.3",
)
DEVICE_PRICES = About(
    "TOML file of [[price]] rows to use with the catalogue's; `ridgeline catalogue --output` "
    "writes one.",
    path="input",
    since="0.3",
)
ACCEPT_STALE = About("Use prices older than a year; the output says so.")
QUESTION_PAIRS = About(
    "JSONL file of equal and different questions: calibrates by how similar the last user message "
    "must be to get a stored answer to another one. Lossy.",
    metavar="FILE",
    unset="equal requests only",
)
MAX_FALSE_HITS = About(
    "Limit of the false-hit rate on the different pairs, with 95 % confidence.",
    unit=SHARE,
    range=Range(0, 0.5, exclusive=True),
)
WHAT_IF = About(
    "Edit the model's shape: 'key=N' of layers, channels, experts_per_token, attention_every, "
    "own_head, latent, kv_heads, window, global_every and share.",
    metavar="EDITS",
    since="0.3",
)
SPECULATIVE = About(
    "Speculative decoding, as of `serve`: "
    '\'{"method": "eagle", "num_speculative_tokens": 3}\'; without a number, as many as pay.',
    unset="off",
    since="0.3",
)
DRAFT_SHARE = About(
    "Share of the sequences that have a draft in a step, such as requests with a prediction; of "
    "method auto, that have one by lookup.",
    unit=SHARE,
    since="0.3",
)
BEAM_WIDTH = About(
    "Beam search: beams of every request.", unit=COUNT, range=Range(1, 128), since="0.3"
)
EMBEDDING_BITS = About("Bits of a packed embedding table.", unset="as stored", since="0.3")
QUANTIZATION_METHOD = About(
    "Method of `ridgeline quantize` whose cost to make the weights is predicted too.",
    unset="not predicted",
    since="0.3",
)
THINKING_LEN = About(
    "Tokens of an output that are thinking.", unit=TOKENS, range=NON_NEGATIVE_COUNT, since="0.3"
)
THINKING_BUDGET = About(
    "Tokens after which the thinking is ended.", unit=TOKENS, unset="no limit", since="0.3"
)
ENFORCE_EAGER = About("Launch every kernel from the host, without captured graphs.", since="0.3")
ASYNC_SCHEDULING = About("Schedule a step while the last one runs.", since="0.3")
STRUCTURED_SHARE = About(
    "Share of the requests whose output follows a schema or a grammar.", unit=SHARE, since="0.3"
)
RULED_SHARE = About(
    "Share of the requests with bad_words or a thinking budget.", unit=SHARE, since="0.3"
)
CHUNKED_PREFILL = About("Compute long prompts in chunks over several steps.", since="0.3")
BLOCK_TOKENS = About(
    "Tokens of a block of the KV cache.", unit=COUNT, range=Range(1, 4096), since="0.3"
)
DROPPED_CONTEXT = About(
    "Share of the prompt tokens that context reduction drops as duplicates.",
    unit=SHARE,
    since="0.3",
)
DOCUMENT_LEN = About(
    "Tokens of a prompt that are documents to compress.", unit=TOKENS, unset="0", since="0.3"
)
KEEP_RATIO = About(
    "Share of the documents' tokens that compression keeps.",
    unit=SHARE,
    unset="not compressed",
    since="0.3",
)
NEW_DOCUMENTS = About(
    "Share of the documents that were not compressed before, and are read once to score them.",
    unit=SHARE,
    since="0.3",
)
SHADOW_SHARE = About(
    "Canary: share of the requests whose copy a new version answers, on replicas for it alone.",
    unit=SHARE,
    since="0.3",
)
FALLBACK_SHARE = About(
    "Share of the requests that a managed API answers, at its price.", unit=SHARE, since="0.3"
)
