"""Names of OpenTelemetry's semantic conventions for generative AI (0.1.0), in one table.

The conventions are in development and have moved before: this is the place to follow them. Metrics
of tokens exist among those of clients alone.
"""

from __future__ import annotations

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
TOP_K = "gen_ai.request.top_k"
SEED = "gen_ai.request.seed"
NUM_CHOICES = "gen_ai.request.choice.count"
FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
STREAMED = "gen_ai.request.stream"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
URL_PATH = "url.path"
URL_SCHEME = "url.scheme"

# Ridgeline's own, where the conventions have none
SLO_CLASS = "ridgeline.slo_class"
RESUMED = "ridgeline.resumed"
MIGRATED = "ridgeline.migrated"
ATTEMPTS = "ridgeline.attempts"
BACKEND = "ridgeline.backend"
EVENT_STARTED = "ridgeline.started"
EVENT_FIRST_TOKEN = "ridgeline.first_token"

DURATION = "gen_ai.server.request.duration"
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"
USED_INPUT_TOKENS = "gen_ai.client.inference.usage.input_tokens"
USED_CACHED_TOKENS = "gen_ai.client.inference.usage.cache_read.input_tokens"
USED_OUTPUT_TOKENS = "gen_ai.client.inference.usage.output_tokens"
EACH_INPUT_TOKENS = "gen_ai.client.inference.operation.input_tokens"
EACH_OUTPUT_TOKENS = "gen_ai.client.inference.operation.output_tokens"
MODALITY = "gen_ai.token.modality"

PROVIDER_NAME = "ridgeline"
TEXT = "text"
DURATION_BUCKETS = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
