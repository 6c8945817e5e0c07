"""The OpenAI and Anthropic SDKs through every endpoint that they have and the gateway serves."""

import io
import subprocess
import sys
import urllib.request

import anthropic
import langchain_openai
import openai

base, admin = sys.argv[1:3]
# The command that reads streams with the Node SDK, where node is installed.
node = sys.argv[3:]
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


def continued():
    """Streams that went on elsewhere because their engine failed, so far."""
    lines = urllib.request.urlopen(f"{admin}/metrics").read().decode().splitlines()
    start, labels = "pointsman_continuations_total", ['cause="failure"', 'reason="continued']
    fits = lambda line: line.startswith(start) and all(label in line for label in labels)
    return sum(int(line.split()[-1]) for line in lines if fits(line))


def read_with_openai(prompt):
    chunks = list(client.chat.completions.create(
        model="tiny", messages=prompt, max_tokens=24, stream=True, stream_options={"include_usage": True}
    ))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    roles = [choice.delta.role for choice in choices if choice.delta.role]
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    usages = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1, chunks
    assert (roles, reasons, usages) == (["assistant"], ["length"], [24]), chunks
    return "".join(choice.delta.content or "" for choice in choices)


def read_with_langchain(prompt):
    model = langchain_openai.ChatOpenAI(
        base_url=f"{base}/v1", api_key="none", model="tiny", max_tokens=24, max_retries=0
    )
    whole = None
    for chunk in model.stream(prompt):
        whole = chunk if whole is None else whole + chunk
    assert whole.response_metadata["finish_reason"] == "length", whole
    return whole.content


def read_with_node(prompt):
    answer = subprocess.run([*node, f"{base}/v1", prompt[0]["content"]], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def kills(read):
    """Streams whose engine ends the connection after a few tokens: the SDK sees nothing of it."""

    def call():
        before, streams = continued(), 40
        for stream in range(streams):
            # One of the two decode engines cuts half of the answers to prompts with this text.
            prompt = [{"role": "user", "content": f"cut-this-stream {stream} {read.__name__}"}]
            whole = client.chat.completions.create(model="tiny", messages=prompt, max_tokens=24)
            text = read(prompt)
            assert text == whole.choices[0].message.content, (text, whole)
        count = continued() - before
        assert count > 0, "no stream was cut"
        return f"{streams} streams are whole, {count} of them went on elsewhere"

    return call


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
    ("cut: openai", kills(read_with_openai)),
    ("cut: langchain", kills(read_with_langchain)),
]
if node:
    calls.append(("cut: openai for Node", kills(read_with_node)))
print(f"openai {openai.__version__}, anthropic {anthropic.__version__}")
for name, call in calls:
    print(f"{name:<24} {call()}")
