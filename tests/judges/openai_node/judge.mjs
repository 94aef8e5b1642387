// OpenAI's Node SDK. Runs as `node judge.mjs URL MODEL` with the package's folder in NODE_PATH's place: see run_node.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, model, folder] = process.argv.slice(2);
const found = createRequire(pathToFileURL(`${folder}/package.json`)).resolve("openai");
const { default: OpenAI } = await import(pathToFileURL(found));
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "-", timeout: 60_000, maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];

function assert(condition, text) {
  if (!condition) throw new Error(text);
}

const checks = {
  "models: list": async () => {
    const page = await client.models.list();
    assert(page.data[0].id === model, JSON.stringify(page.data));
  },
  "chat: message and usage": async () => {
    const reply = await client.chat.completions.create({ model, messages, max_tokens: 6, temperature: 0 });
    assert(reply.choices[0].message.content.length > 0, "no text");
    assert(reply.usage.completion_tokens <= 6, "too many tokens");
  },
  "chat: stream": async () => {
    const given = { model, messages, max_tokens: 6, temperature: 0 };
    const stream = await client.chat.completions.create({ ...given, stream: true, stream_options: { include_usage: true } });
    let text = "", last = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      last = chunk;
    }
    const whole = await client.chat.completions.create(given);
    assert(text === whole.choices[0].message.content, `${text} is not ${whole.choices[0].message.content}`);
    assert(last.usage.total_tokens === whole.usage.total_tokens, "usage differs");
  },
  "chat: the stream helper accumulates": async () => {
    const stream = client.chat.completions.stream({ model, messages, max_tokens: 6, temperature: 0 });
    const content = await stream.finalContent();
    assert(content.length > 0, "no text");
  },
  "chat: a stream that is aborted ends": async () => {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 200, stream: true });
    for await (const chunk of stream) {
      assert(chunk.id, "no id");
      break;
    }
  },
  "completions: stream of two prompts": async () => {
    const texts = ["", ""];
    const stream = await client.completions.create({ model, prompt: ["a b c", "1 2 3"], max_tokens: 4, stream: true });
    for await (const chunk of stream) for (const choice of chunk.choices) texts[choice.index] += choice.text;
    assert(texts.every((t) => t.length > 0), JSON.stringify(texts));
  },
  "errors: status and parameter": async () => {
    try {
      await client.chat.completions.create({ model, messages, temperature: -1 });
    } catch (error) {
      assert([400, 422].includes(error.status) && error.param === "temperature", `${error.status} ${error.param}`);
      return;
    }
    throw new Error("not refused");
  },
};

for (const [check, run] of Object.entries(checks)) {
  try {
    await run();
    console.log(JSON.stringify({ check, ok: true }));
  } catch (error) {
    console.log(JSON.stringify({ check, ok: false, why: `${error.name}: ${error.message}`.slice(0, 2000) }));
  }
}
