// OpenAI's Node SDK. Runs as `node judge.mjs URL MODEL` with the package's folder in NODE_PATH's place: see run_node.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, model, folder] = process.argv.slice(2);
const find = createRequire(pathToFileURL(`${folder}/package.json`)).resolve;
const load = (name) => import(pathToFileURL(find(name)));
const { default: OpenAI } = await load("openai");
const { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } = await load("openai/helpers/zod");
const { z } = await load("zod");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "-", timeout: 60_000, maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];

function assert(condition, text) {
  if (!condition) throw new Error(text);
}

const Unit = z.object({ unit: z.enum(["C", "F"]), exact: z.boolean() });
const named = { type: "function", function: { name: "get_weather" } };
const weather = (called) => zodFunction({
  name: "get_weather", description: "The weather here", parameters: Unit,
  function: (given) => { called.push(given); return "Rain, 7 degrees."; },
});

function isUnit(value) {
  assert(["C", "F"].includes(value?.unit) && typeof value.exact === "boolean", JSON.stringify(value));
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
  "chat: parse into a zod object": async () => {
    const response_format = zodResponseFormat(Unit, "unit");
    const given = { model, messages, max_tokens: 120, temperature: 0, response_format };
    isUnit((await client.chat.completions.parse(given)).choices[0].message.parsed);
    const stream = client.chat.completions.stream(given);
    let seen = 0;
    stream.on("content.delta", ({ parsed }) => { if (parsed !== null) seen += 1; });
    isUnit((await stream.finalChatCompletion()).choices[0].message.parsed);
    assert(seen > 0, "no parsed deltas");
  },
  "chat: tool calls parse, whole and accumulated": async () => {
    const given = { model, messages, max_tokens: 60, tools: [weather([])], tool_choice: "required" };
    isUnit((await client.chat.completions.parse(given)).choices[0].message.tool_calls[0].function.parsed_arguments);
    const stream = client.chat.completions.stream(given);
    const pieces = [], done = [];
    stream.on("tool_calls.function.arguments.delta", (event) => pieces.push(event.arguments_delta));
    stream.on("tool_calls.function.arguments.done", (event) => done.push(event));
    const { finish_reason, message } = (await stream.finalChatCompletion()).choices[0];
    assert(finish_reason === "tool_calls", finish_reason);
    isUnit(message.tool_calls[0].function.parsed_arguments);
    assert(done.length === 1 && pieces.join("") === done[0].arguments, JSON.stringify([pieces, done]));
    assert(done[0].arguments === message.tool_calls[0].function.arguments, message.tool_calls[0].function.arguments);
  },
  "chat: runTools calls the function, streamed and not": async () => {
    for (const stream of [false, true]) {
      const called = [];
      const runner = client.chat.completions.runTools({
        model, messages, max_tokens: 60, tools: [weather(called)], tool_choice: named, stream,
      });
      await runner.done();
      assert(called.length === 1, `called ${called.length} times`);
      isUnit(called[0]);
      const [call, result] = runner.messages.slice(-2);
      assert(call.tool_calls[0].id === result.tool_call_id && result.content === "Rain, 7 degrees.", JSON.stringify(result));
      const told = await client.chat.completions.create({ model, messages: runner.messages, max_tokens: 8 });
      assert(told.usage.prompt_tokens > 0, "no answer after the result");
    }
  },
  "responses: create and stream": async () => {
    const given = { model, input: "Say hello.", max_output_tokens: 8, temperature: 0 };
    const whole = await client.responses.create(given);
    assert(whole.output_text.length > 0, "no text");
    const kinds = [];
    let text = "";
    for await (const event of await client.responses.create({ ...given, stream: true })) {
      kinds.push(event.type);
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert(text === whole.output_text, `${text} is not ${whole.output_text}`);
    assert(kinds[0] === "response.created" && /completed|incomplete/.test(kinds.at(-1)), kinds.join());
    const final = await client.responses.stream(given).finalResponse();
    assert(final.output_text === whole.output_text, `${final.output_text} is not ${whole.output_text}`);
  },
  "responses: parse into a zod object": async () => {
    const text = { format: zodTextFormat(Unit, "unit") };
    const given = { model, input: "Unit?", max_output_tokens: 120, temperature: 0, text };
    isUnit((await client.responses.parse(given)).output_parsed);
    isUnit((await client.responses.stream(given).finalResponse()).output_parsed);
  },
  "responses: function calls parse, whole and streamed, and their results": async () => {
    const tool = zodResponsesFunction({ name: "get_weather", parameters: Unit });
    const given = { model, input: "Unit?", max_output_tokens: 60, tools: [tool], tool_choice: "required" };
    const [call] = (await client.responses.parse(given)).output;
    isUnit(call.parsed_arguments);
    let done = null;
    for await (const event of client.responses.stream(given)) {
      if (event.type === "response.function_call_arguments.done") done = event;
    }
    isUnit(JSON.parse(done.arguments));
    const { parsed_arguments, ...item } = call;
    const result = { type: "function_call_output", call_id: call.call_id, output: "Rain, 7 degrees." };
    const input = [{ role: "user", content: "Unit?" }, item, result];
    assert((await client.responses.create({ model, input, max_output_tokens: 8 })).output.length > 0, "no answer");
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
