"""The OpenAI and Anthropic SDKs through every endpoint that they have and the gateway serves."""

import io
import sys

import anthropic
import openai

base = sys.argv[1]
client = openai.OpenAI(base_url=f"{base}/v1", api_key="none")
claude = anthropic.Anthropic(base_url=base, api_key="none")
messages = [{"role": "user", "content": "hello from the SDK"}]


def chat():
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
    parts, usage = [], None
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        parts += [choice.delta.content or "" for choice in chunk.choices]
    text = "".join(parts)
    assert text and text == whole.choices[0].message.content, (text, whole)
    assert usage.completion_tokens == 8, usage
    return f"streamed {len(parts)} chunks, {usage.completion_tokens} tokens: {text!r}"


def completions():
    whole = client.completions.create(model="tiny", prompt="hello", max_tokens=4)
    text = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(model="tiny", prompt="hello", max_tokens=4, stream=True)
    )
    assert text == whole.choices[0].text and whole.usage.completion_tokens == 4, (text, whole)
    return f"{text!r}"


def embeddings():
    answer = client.embeddings.create(model="tiny", input=["a", "b"], encoding_format="float")
    assert len(answer.data) == 2 and answer.data[0].embedding, answer
    return f"{len(answer.data)} vectors of {len(answer.data[0].embedding)}"


def responses():
    whole = client.responses.create(model="tiny", instructions="be kind", input="hello", max_output_tokens=8)
    assert whole.status == "incomplete" and whole.usage.output_tokens == 8, whole
    kinds, text = [], ""
    for event in client.responses.create(model="tiny", input="hello", max_output_tokens=8, stream=True):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete", kinds
    assert text, kinds
    return f"whole {whole.output_text!r}, streamed {len(kinds)} events"


def models():
    listed = [model.id for model in client.models.list()]
    one = client.models.retrieve("tiny")
    assert listed == ["tiny"] and one.id == "tiny", (listed, one)
    return f"list {listed}, retrieve {one.id}"


def transcriptions():
    audio = ("hello.wav", io.BytesIO(b"RIFF" + bytes(100_000)), "audio/wav")
    whole = client.audio.transcriptions.create(model="tiny", file=audio)
    audio = ("hello.wav", io.BytesIO(b"RIFF" + bytes(100_000)), "audio/wav")
    text = client.audio.transcriptions.create(model="tiny", file=audio, response_format="text")
    assert whole.text == "100004 bytes of audio" and text.strip() == whole.text, (whole, text)
    return f"{whole.text!r}"


def translations():
    audio = ("hello.wav", io.BytesIO(b"RIFF" + bytes(10)), "audio/wav")
    whole = client.audio.translations.create(model="tiny", file=audio)
    assert whole.text == "14 bytes of audio", whole
    return f"{whole.text!r}"


def claude_messages():
    whole = claude.messages.create(model="tiny", system="be kind", messages=messages, max_tokens=8)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 8, whole
    with claude.messages.stream(model="tiny", system="be kind", messages=messages, max_tokens=8) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text and final.usage.output_tokens == 8, (text, final)
    return f"streamed {text!r}, {final.stop_reason}"


def count_tokens():
    count = claude.messages.count_tokens(model="tiny", messages=messages)
    assert count.input_tokens > 0, count
    return f"{count.input_tokens} tokens"


def errors():
    seen = []
    try:
        client.chat.completions.create(model="nope", messages=messages)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error
        seen.append(f"openai {error.status_code} {error.code}")
    try:
        claude.messages.create(model="nope", messages=messages, max_tokens=1)
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error", error.body
        seen.append(f"anthropic {error.status_code} {error.body['error']['type']}")
    try:
        client.responses.create(model="tiny", input="hello", max_output_tokens=0)
    except openai.BadRequestError as error:
        seen.append(f"openai {error.status_code} of the engine")
    assert len(seen) == 3, seen
    return ", ".join(seen)


calls = [
    ("chat.completions", chat),
    ("completions", completions),
    ("embeddings", embeddings),
    ("responses", responses),
    ("models", models),
    ("audio.transcriptions", transcriptions),
    ("audio.translations", translations),
    ("anthropic messages", claude_messages),
    ("anthropic count_tokens", count_tokens),
    ("errors", errors),
]
print(f"openai {openai.__version__}, anthropic {anthropic.__version__}")
for name, call in calls:
    print(f"{name:<24} {call()}")
