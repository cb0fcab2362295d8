// A backend of three lines' worth of business: POST /ask with a question, the answer comes back as it is written.

import { createServer } from "node:http";
import grpc from "@grpc/grpc-js";
import { connect } from "./tandem.js";

const STATUS = {
  [grpc.status.INVALID_ARGUMENT]: 400,
  [grpc.status.RESOURCE_EXHAUSTED]: 429,
  [grpc.status.UNAVAILABLE]: 503,
  [grpc.status.DEADLINE_EXCEEDED]: 504,
};
const MAX_QUESTION_CHARS = 64 * 1024;

const tandem = await connect(process.env.TANDEM_ADDRESS ?? "127.0.0.1:50051");
const deadlineMs = Number(process.env.DEADLINE_MS ?? 60_000);

const server = createServer(async (request, response) => {
  if (request.method !== "POST" || request.url !== "/ask") {
    response.writeHead(404).end("POST a question to /ask\n");
    return;
  }
  const gone = new AbortController();
  response.on("close", () => gone.abort()); // a client that disconnects ends its request
  try {
    const question = {
      chat: { messages: [{ role: "user", content: await body(request) }] },
      sampling: { max_tokens: 256 },
    };
    for await (const { tokens, delta } of tandem.generate(question, { deadlineMs, signal: gone.signal })) {
      response.write(delta?.content ?? tokens.text); // of a model that thinks first: without what it thinks
    }
    response.end("\n");
  } catch (error) {
    if (gone.signal.aborted) return;
    if (response.headersSent) {
      response.destroy(); // the reader must not take half an answer for a whole one
      return;
    }
    response.writeHead(error.status ?? STATUS[error.code] ?? 500).end(`${error.details ?? error.message}\n`);
  }
});

async function body(request) {
  let text = "";
  for await (const piece of request.setEncoding("utf8")) {
    if (text.length <= MAX_QUESTION_CHARS) text += piece; // the rest is dropped: leaving the loop resets the connection
  }
  if (text.length > MAX_QUESTION_CHARS) throw Object.assign(new Error("the question is too long"), { status: 413 });
  return text;
}

server.listen(Number(process.env.PORT ?? 3000), "127.0.0.1", () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}`);
});
process.on("SIGTERM", () => {
  server.close(() => tandem.close());
  server.closeIdleConnections();
});
