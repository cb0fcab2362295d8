// A client of Tandem's gRPC API, made at run time from the protos: nothing is generated, nothing else is needed.

import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const PROTOS = process.env.TANDEM_PROTOS ?? fileURLToPath(new URL("../../protos", import.meta.url));

// Tried again until the answer begins, after the time that the server names in `grpc-retry-pushback-ms`. A stream that has
// begun is never asked for again: Tandem itself moves it to other instances, and its tokens come exactly once.
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

/** A connection to the router at `address` (host:port), shared by all requests of a process. */
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
  const client = new GenerationService(address, grpc.credentials.createInsecure(), {
    "grpc.service_config": SERVICE_CONFIG,
    "grpc.enable_retries": 1,
    "grpc.keepalive_time_ms": 30_000,
  });
  return new Tandem(client);
}

class Tandem {
  #client;

  constructor(client) {
    this.#client = client;
  }

  /**
   * The messages of one request (protos/tandem/v1/generation.proto) as they come.
   *
   * Leaving the loop, or aborting `signal`, cancels the request, wherever it is; after `deadlineMs` it fails with
   * DEADLINE_EXCEEDED. Errors are those of @grpc/grpc-js: `error.code` is one of `grpc.status`.
   */
  async *generate(request, { deadlineMs = 60_000, signal, metadata = {} } = {}) {
    const call = this.#client.Generate(request, grpc.Metadata.fromHttp2Headers(metadata), {
      deadline: Date.now() + deadlineMs,
    });
    call.on("error", () => {}); // the loop below throws it; without a listener a late one would end the process
    const cancel = () => call.cancel();
    signal?.addEventListener("abort", cancel, { once: true });
    if (signal?.aborted) cancel();
    try {
      yield* call;
    } finally {
      signal?.removeEventListener("abort", cancel);
      call.cancel(); // nothing, if it is over
    }
  }

  close() {
    this.#client.close();
  }
}
