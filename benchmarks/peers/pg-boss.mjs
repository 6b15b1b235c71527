// pg-boss with batches of 1,000, which its documentation gives for throughput: *one handler call a batch*, so it does not
// run one handler per job as the others do. Woken by NOTIFY; no pause while batches are full.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { BATCH, Counter, command, produce, untilEndOfInput } from "./shared/progress.mjs";

const require = createRequire(`${process.env.PEER_FOLDER}/`);
const { PgBoss } = await import(pathToFileURL(require.resolve("pg-boss")).href);
const QUEUE = "noop";

const [what, , count] = command();
const boss = new PgBoss({
  host: process.env.PGHOST,
  database: process.env.PGDATABASE,
  user: process.env.PGUSER,
  useListenNotify: true,
});
boss.on("error", console.error);
await boss.start();

async function fill() {
  for (let start = 0; start < count; start += BATCH) {
    const size = Math.min(BATCH, count - start);
    await boss.insert(QUEUE, Array.from({ length: size }, () => ({ data: { mark: -1 } })));
  }
}

async function work() {
  const counter = new Counter();
  const options = { batchSize: 1000, pollingIntervalSeconds: 0.5, burstWhenBatchFull: true };
  await boss.work(QUEUE, options, async (jobs) => {
    for (const job of jobs) counter.count(job.data.mark);
  });
  await untilEndOfInput(counter);
}

if (what === "setup") await boss.createQueue(QUEUE, { notify: true });
else if (what === "fill") await fill();
else if (what === "work") await work();
else await produce(count, (mark) => boss.send(QUEUE, { mark }));
await boss.stop({ graceful: false });
process.exit(0);
