"""Stock clients against a live server, in an environment without Ridgeline: `make test-clients`.

python stock_clients.py URL          exit code 1 if a check fails
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable

URL = sys.argv[1] if len(sys.argv) > 1 else ""
HI = [{"role": "user", "content": "hi"}]
PARAMETERS = {
    "$defs": {"Place": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                        "required": ["city"], "additionalProperties": False}},
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}},
    "required": ["place"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}


def check_openai_streams_report_forced_calls_as_done() -> None:
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    with client.chat.completions.stream(
        model="demo", messages=HI, tools=[TOOL], tool_choice="required", max_tokens=200,
        parallel_tool_calls=False,
    ) as stream:  # fmt: skip
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds, kinds
    (call,) = final.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["place"]["city"] in ("Oslo", "Rome")


def check_openai_responses_have_structured_output() -> None:
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    schema = {"type": "json_schema", "name": "place", "schema": PARAMETERS}
    response = client.responses.create(
        model="demo", input="hi", text={"format": schema}, max_output_tokens=200
    )
    assert json.loads(response.output_text)["place"]["city"] in ("Oslo", "Rome")


def check_anthropic_continues_a_prefill_and_calls_tools() -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    prefilled = [*HI, {"role": "assistant", "content": "The answer is ("}]
    assert client.messages.create(model="demo", max_tokens=5, messages=prefilled).content
    tool = {"name": "look", "input_schema": PARAMETERS}
    with client.messages.stream(
        model="demo", max_tokens=200, messages=HI, tools=[tool],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as stream:  # fmt: skip
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use", message
    assert message.content[0].input["place"]["city"] in ("Oslo", "Rome")


def check_langchain_embeds_many_texts_and_calls_tools() -> None:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(
        model="demo", base_url=f"{URL}/v1", api_key="none", check_embedding_ctx_length=False
    )
    assert len(embeddings.embed_documents(["a"] * 300)) == 300
    chat = ChatOpenAI(model="demo", base_url=f"{URL}/v1", api_key="none", max_tokens=200)
    reply = chat.bind_tools([TOOL], tool_choice="look").invoke("hi")
    assert reply.tool_calls[0]["args"]["place"]["city"] in ("Oslo", "Rome")


def check_litellm_completes_and_recognises_a_long_prompt() -> None:
    import litellm

    options = {"model": "openai/demo", "api_base": f"{URL}/v1", "api_key": "none"}
    reply = litellm.completion(messages=HI, max_tokens=5, **options)
    assert reply.usage.completion_tokens > 0
    too_long = [{"role": "user", "content": "word " * 20_000}]
    try:
        litellm.completion(messages=too_long, max_tokens=5, num_retries=0, **options)
    except litellm.BadRequestError as error:
        assert "too long" in str(error)
    else:
        raise AssertionError("a prompt longer than the context was answered")


def check_openai_agents_send_tools_and_a_format_on_every_turn() -> None:
    import agents
    import openai
    import pydantic

    class Place(pydantic.BaseModel):
        city: str

    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    agents.set_tracing_disabled(True)
    loop = asyncio.new_event_loop()

    @agents.function_tool
    def look(city: str) -> str:
        """Look."""
        return "sunny"

    for model in (
        agents.OpenAIChatCompletionsModel(model="demo", openai_client=client),
        agents.OpenAIResponsesModel(model="demo", openai_client=client),
    ):
        agent = agents.Agent(
            name="a", instructions="Answer.", model=model, tools=[look], output_type=Place,
            model_settings=agents.ModelSettings(max_tokens=300, tool_choice="required"),
        )  # fmt: skip
        # the demo model is weak: what counts is that the server takes every request
        with contextlib.suppress(agents.MaxTurnsExceeded, agents.ModelBehaviorError):
            loop.run_until_complete(agents.Runner.run(agent, "hi", max_turns=2))


def run(check: Callable[[], None]) -> bool:
    name = check.__name__.removeprefix("check_").replace("_", " ")
    try:
        check()
    except Exception:
        traceback.print_exc()
        print(f"FAILED  {name}", flush=True)
        return False
    print(f"ok      {name}", flush=True)
    return True


if __name__ == "__main__":
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # fetches nothing
    checks = [value for name, value in [*globals().items()] if name.startswith("check_")]
    raise SystemExit(0 if sum(map(run, checks)) == len(checks) else 1)
