// graphile-worker with the settings of the quick stats in its documentation: 24 jobs at once, a local queue of 500,
// completions and failures batched without delay. SHAPE=keys: a thousand of its named queues, whose jobs run one after the other;
// SHAPE=unique: a job key for each job. Its packages are found through the folder it was installed in.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { BATCH, Counter, SHAPE, command, enqueueAtOnce, produce, untilEndOfInput } from "./shared/progress.mjs";

const require = createRequire(`${process.env.PEER_FOLDER}/`);
const { run, makeWorkerUtils, runMigrations } = await import(pathToFileURL(require.resolve("graphile-worker")).href);
const { Pool } = require("pg");

const [what, , count] = command();
const CONCURRENT = 24;
const pool = new Pool({ max: CONCURRENT + 1 }); // PGHOST, PGDATABASE and PGUSER are set
pool.on("error", console.error);
pool.on("connect", (client) => client.on("error", console.error));

async function withUtils(body) {
  const utils = await makeWorkerUtils({ pgPool: pool });
  await body(utils);
  await utils.release();
}

async function fill(utils) {
  for (let start = 0; start < count; start += BATCH) {
    const size = Math.min(BATCH, count - start);
    const job = (n) => ({ identifier: "noop", payload: { mark: -1 }, ...(SHAPE === "keys" && { queueName: `q${n % 1000}` }) });
    await utils.addJobs(Array.from({ length: size }, (_, n) => job(start + n)));
  }
}

async function work() {
  const counter = new Counter();
  const runner = await run({
    pgPool: pool,
    noHandleSignals: true,
    taskList: { noop: async (payload) => counter.count(payload.mark) },
    preset: {
      worker: {
        concurrentJobs: CONCURRENT,
        maxPoolSize: CONCURRENT + 1,
        localQueue: { size: 500 },
        completeJobBatchDelay: 0,
        failJobBatchDelay: 0,
      },
    },
  });
  await untilEndOfInput(counter);
  await runner.stop();
}

if (what === "setup") await runMigrations({ pgPool: pool });
else if (what === "fill") await withUtils(fill);
else if (what === "work") await work();
else if (what === "enqueue")
  await withUtils((utils) =>
    enqueueAtOnce(count, (n) => utils.addJob("noop", { mark: -1 }, SHAPE === "unique" ? { jobKey: `k${n}` } : {})),
  );
else await withUtils((utils) => produce(count, (mark) => utils.addJob("noop", { mark })));
await pool.end();
process.exit(0);
