// Reads one chat stream with the Node SDK and prints its text. Arguments: base URL, prompt.
import OpenAI from "openai";

const [baseURL, content] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const stream = client.chat.completions.stream({
  model: "tiny",
  messages: [{ role: "user", content }],
  max_tokens: 24,
});
const { message, finish_reason: reason } = (await stream.finalChatCompletion()).choices[0];
if (reason !== "length") throw new Error(`finish_reason is ${reason}`);
process.stdout.write(message.content);
