// Features of JavaScript clients against a router: `node features.mjs BASE_URL PACKAGES`.
// Prints one JSON object a line, as features.py does.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [base, packages, origin] = process.argv.slice(2);
const require = createRequire(packages + "/");
const load = async (name) => import(pathToFileURL(require.resolve(name)));
const model = "model";
const messages = [{ role: "user", content: "Tell me a story about a fox." }];
const asked = [{ role: "user", content: "What is the weather in Paris?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};

function check(condition, what) {
  if (!condition) throw new Error(what);
}

const features = {
  "fetch (Node): a preflight and an answer for a page": async () => {
    const asking = { origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization" };
    const preflight = await fetch(`${base}/v1/chat/completions`, { method: "OPTIONS", headers: asking });
    check(preflight.ok, `the preflight has status ${preflight.status}`);
    check(preflight.headers.get("access-control-allow-headers").includes("authorization"), "no key may be sent");
    const body = JSON.stringify({ model, messages, max_tokens: 5 });
    const headers = { origin, "content-type": "application/json" };
    const answer = await fetch(`${base}/v1/chat/completions`, { method: "POST", headers, body });
    check(answer.headers.get("access-control-allow-origin") === origin, "the page may not read the answer");
  },
  "openai (Node): chat, stream, forced tools, responses": async () => {
    const { default: OpenAI } = await load("openai");
    const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0 });
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 20 });
    check(answer.choices[0].message.content, "no content");
    let text = "";
    for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 20, stream: true }))
      text += chunk.choices[0]?.delta?.content ?? "";
    check(text, "no text in the stream");
    const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
    const called = await client.chat.completions.create({
      model, messages: asked, tools, tool_choice: "required", max_tokens: 64,
    });
    check(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).city, "no city");
    const response = await client.responses.create({ model, input: "Hello", max_output_tokens: 20 });
    check(response.output_text, "no output_text");
  },
  "ai (Vercel): chat, stream, forced tools": async () => {
    const { generateText, streamText, tool, jsonSchema } = await load("ai");
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    const teller = createOpenAICompatible({ name: "tandem", baseURL: `${base}/v1`, apiKey: "none" })(model);
    const prompt = "Tell me a story about a fox.";
    check((await generateText({ model: teller, prompt, maxOutputTokens: 20 })).text, "no text");
    let text = "";
    for await (const piece of streamText({ model: teller, prompt, maxOutputTokens: 20 }).textStream) text += piece;
    check(text, "no text in the stream");
    const called = await generateText({
      model: teller,
      prompt: asked[0].content,
      tools: { get_weather: tool({ description: "Weather of a city.", inputSchema: jsonSchema(parameters) }) },
      toolChoice: "required",
      maxOutputTokens: 64,
    });
    check(called.toolCalls[0].input.city, "no city");
  },
  "ai (Vercel): images": async () => {
    const { generateText } = await load("ai");
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    const seeing = createOpenAICompatible({ name: "tandem", baseURL: `${base}/v1`, apiKey: "none" })("seeing");
    const picture = new Uint8Array([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a, ...new Array(40).fill(0)]);
    const content = [{ type: "text", text: "see" }, { type: "image", image: picture, mediaType: "image/png" }];
    const answer = await generateText({ model: seeing, messages: [{ role: "user", content }], maxOutputTokens: 2 });
    check(answer.usage.inputTokens > 20, "the picture has no tokens");
  },
};

for (const [name, run] of Object.entries(features)) {
  let failure = "";
  try {
    await run();
  } catch (error) {
    console.error(error);
    failure = String(error).slice(0, 300);
  }
  const [client, feature] = name.split(": ");
  console.log(JSON.stringify({ client, feature, failure, expected: "" }));
}
