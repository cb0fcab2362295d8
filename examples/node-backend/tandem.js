// A client of Tandem's gRPC API, made at run time from the protos: nothing is generated, nothing else is needed.

import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const PROTOS = process.env.TANDEM_PROTOS ?? fileURLToPath(new URL("../../protos", import.meta.url));

// Tried again until the answer begins, after the time that the server names in `grpc-retry-pushback-ms`. Of a stream that
// has begun only the rest is asked for (Progress): when its router dies. Between instances the router moves it itself.
// Calls for the rest are not retried by gRPC: Progress sees the end of each.
const SERVICE_CONFIG = JSON.stringify({
  methodConfig: [
    {
      name: [{ service: "tandem.v1.GenerationService", method: "Generate" }],
      retryPolicy: {
        maxAttempts: 5,
        initialBackoff: "0.2s",
        maxBackoff: "2s",
        backoffMultiplier: 2,
        retryableStatusCodes: ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
      },
    },
  ],
});

const CONNECTION = {
  "grpc.keepalive_time_ms": 10_000, // a frozen router is noticed after 15 s
  "grpc.keepalive_timeout_ms": 5_000,
  "grpc.initial_reconnect_backoff_ms": 100, // a router that restarts is found again at once, however long it was away
  "grpc.max_reconnect_backoff_ms": 500,
};
const THIS_MACHINE = /^(localhost|127(\.\d+){3}|\[::1\]):\d+$/; // a proxy that the environment names cannot reach it

const MAX_RESUMPTIONS = 3;
const RESUME_WAIT_MS = 30_000; // enough for a router that is restarted
const MIN_DELAY_MS = 200;
const MAX_DELAY_MS = 1000;
const CONNECTION_LOST = /^(Connection dropped|(read|write) (ECONNRESET|ETIMEDOUT))/; // gRPC's own texts
const STREAM_RESET = /^Received RST_STREAM/; // of an INTERNAL: a proxy has ended the stream, since its router has died
const STREAM_CANCELLED = "Call cancelled"; // of a CANCELLED: likewise; this side's own says "Cancelled on client"

/** A client of the router at `address` (host:port), whose connections all requests of a process share. */
export async function connect(address) {
  const definition = await protoLoader.load("tandem/v1/generation.proto", {
    includeDirs: [PROTOS],
    keepCase: true,
    longs: String, // a seed has 64 bits
    enums: String,
    defaults: true, // proto3 leaves out what is zero or empty
    oneofs: true,
  });
  const { GenerationService } = grpc.loadPackageDefinition(definition).tandem.v1;
  const proxy = THIS_MACHINE.test(address) ? { "grpc.enable_http_proxy": 0 } : {};
  const clientWith = (options) =>
    new GenerationService(address, grpc.credentials.createInsecure(), { ...CONNECTION, ...proxy, ...options });
  const beginning = clientWith({ "grpc.service_config": SERVICE_CONFIG, "grpc.enable_retries": 1 });
  const resuming = clientWith({ "grpc.enable_retries": 0 });
  return new Tandem(beginning, resuming);
}

class Tandem {
  #beginning;
  #resuming;

  constructor(beginning, resuming) {
    this.#beginning = beginning;
    this.#resuming = resuming;
  }

  /**
   * The messages of one request (protos/tandem/v1/generation.proto) as they come.
   *
   * Of a request with `resume`, as of a backend that has kept the ids and was restarted, the rest comes.
   *
   * Leaving the loop, or aborting `signal`, cancels the request, wherever it is; after `deadlineMs` it fails with
   * DEADLINE_EXCEEDED. Errors are those of @grpc/grpc-js: `error.code` is one of `grpc.status`.
   */
  async *generate(request, { deadlineMs = 60_000, signal, metadata = {} } = {}) {
    const deadline = Date.now() + deadlineMs;
    const progress = new Progress(request);
    for (;;) {
      const client = progress.hasBegun ? this.#resuming : this.#beginning;
      const call = client.Generate(progress.request, grpc.Metadata.fromHttp2Headers(metadata), { deadline });
      call.on("error", () => {}); // the loop below throws it; without a listener a late one would end the process
      const cancel = () => call.cancel();
      let delayMs = MIN_DELAY_MS;
      signal?.addEventListener("abort", cancel, { once: true });
      if (signal?.aborted) cancel();
      try {
        for await (const response of call) {
          progress.add(response);
          yield response;
        }
        return;
      } catch (error) {
        if (!signal?.aborted && progress.isComplete) return; // only the end of the call is missing
        if (signal?.aborted || !progress.mayResume(error)) throw error;
        delayMs = Math.max(delayMs, Math.min(pushbackMs(error) ?? 0, MAX_DELAY_MS));
      } finally {
        signal?.removeEventListener("abort", cancel);
        call.cancel(); // nothing, if it is over
      }
      await sleep(delayMs);
    }
  }

  close() {
    this.#beginning.close();
    this.#resuming.close();
  }
}

/** What has come of an answer: with it, any router generates the rest. */
class Progress {
  #original;
  #seed;
  #requestId;
  #hasBegun = false;
  #choices = new Map(); // ResumedChoice of each that has begun
  #numTokens = 0;
  #numTokensBefore = 0;
  #numLeft = MAX_RESUMPTIONS;
  #until = 0;

  /** What `request` itself resumes, an earlier process of this backend has read. */
  constructor(request) {
    this.#original = request;
    for (const { choice = 0, token_ids = [], ...rest } of request.resume?.choices ?? []) {
      this.#choices.set(choice, { choice, token_ids: [...token_ids], ...rest });
    }
  }

  /** Whether a message has come. */
  get hasBegun() {
    return this.#hasBegun;
  }

  /** The request as it is to be sent now. */
  get request() {
    if (!this.#hasBegun) return this.#original;
    const sampling = { ...this.#original.sampling, seed: this.#seed };
    const resume = { choices: [...this.#choices.values()] };
    return { ...this.#original, request_id: this.#requestId, sampling, resume };
  }

  /** Whether nothing more is to come. */
  get isComplete() {
    const numChoices = Number(this.#original.sampling?.n) || 1; // an int64 may be text
    return this.#choices.size === numChoices && [...this.#choices.values()].every(({ finished }) => finished);
  }

  add({ tokens, seed, fingerprint, request_id }) {
    this.#hasBegun = true;
    this.#seed ??= seed;
    this.#requestId ??= request_id; // by which Abort finds it
    if (!this.#choices.has(tokens.choice)) {
      this.#choices.set(tokens.choice, { choice: tokens.choice, token_ids: [], finished: false, fingerprint });
    }
    const choice = this.#choices.get(tokens.choice);
    // A router of a version without `resume` begins the answer again.
    if (Number(tokens.token_index) !== choice.token_ids.length) {
      throw new Error(`token_index is ${tokens.token_index} where ${choice.token_ids.length} was expected`);
    }
    choice.token_ids.push(...tokens.token_ids);
    choice.finished = tokens.finish != null;
    this.#numTokens += tokens.token_ids.length;
  }

  /** Whether an answer that has begun, and broke off, can go on: its router is gone, or none can continue it yet. */
  mayResume(error) {
    const { CANCELLED, INTERNAL, UNKNOWN, UNAVAILABLE, RESOURCE_EXHAUSTED } = grpc.status;
    const isReset =
      (error.code === INTERNAL && STREAM_RESET.test(error.details)) ||
      (error.code === CANCELLED && error.details === STREAM_CANCELLED) ||
      error.code === UNKNOWN; // no router sends it: the stream ended without a status
    if (!(isReset || [UNAVAILABLE, RESOURCE_EXHAUSTED].includes(error.code)) || !this.#hasBegun) return false;
    // A router that answers says when to retry; what it has tried itself is not worth more attempts.
    const isAnswer = !isReset && (error.code !== UNAVAILABLE || pushbackMs(error) !== undefined);
    const isCutOff = error.metadata.get("tandem-cut-off").length > 0; // it ends, and its streams with it
    const isNew = this.#numTokens > this.#numTokensBefore;
    if (isNew && isAnswer && !isCutOff) return false;
    // A router that had the request meanwhile, and has died, counts even without a token: it may have died of it.
    if (isNew || isCutOff || (!isAnswer && CONNECTION_LOST.test(error.details))) {
      if (this.#numLeft === 0) return false;
      this.#numLeft -= 1;
      this.#numTokensBefore = this.#numTokens;
      this.#until = performance.now() + RESUME_WAIT_MS;
    }
    return performance.now() < this.#until;
  }
}

/** When to retry, as a router says with each UNAVAILABLE of its own; undefined: it does not. */
function pushbackMs(error) {
  const [value] = error.metadata.get("grpc-retry-pushback-ms");
  return value === undefined ? undefined : Number(value);
}
