// What every Node peer says while it works: the twin of progress.py, where the protocol and the commands are told.
// process.hrtime() is CLOCK_MONOTONIC, as Python's time.monotonic() is.

const PULSE = 10;
const EVERY = 50;
export const BATCH = 1000;
export const PRODUCERS = 8;
export const SHAPE = process.env.SHAPE ?? "";

export const now = () => Number(process.hrtime.bigint()) / 1e9;
export const say = (message) => process.stdout.write(JSON.stringify(message) + "\n");
const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, Math.max(0, milliseconds)));

export class Counter {
  ran = 0;
  last = 0;
  starts = [];

  // One handler was called.
  count(mark = -1) {
    this.ran += 1;
    this.last = now();
    if (this.ran === 1) say({ first: this.last });
    if (mark >= 0) this.starts.push([mark, this.last]);
  }

  // Reports progress; ends with the process.
  report() {
    let said = 0;
    setInterval(() => {
      if (this.ran !== said) {
        said = this.ran;
        say({ ran: said, at: this.last });
      }
      if (this.starts.length) say({ starts: this.starts.splice(0) });
    }, PULSE).unref();
  }
}

// Resolves when whoever started us closes our standard input.
export const endOfInput = () =>
  new Promise((resolve) => {
    process.stdin.resume();
    process.stdin.on("end", resolve);
  });

export async function untilEndOfInput(counter) {
  counter.report();
  say({ ready: now() });
  await endOfInput();
}

// One job each 50 ms; says [mark, time at which the enqueue had returned].
export async function produce(count, enqueue) {
  const committed = [];
  let due = now() * 1000;
  for (let mark = 0; mark < count; mark++) {
    due += EVERY;
    await sleep(due - now() * 1000);
    await enqueue(mark);
    committed.push([mark, now()]);
  }
  say({ committed });
}

// `count` jobs by eight at once; says how many a second.
export async function enqueueAtOnce(count, enqueue) {
  const each = Math.floor(count / PRODUCERS);
  const places = Array.from({ length: PRODUCERS }, (_, place) => place);
  await Promise.all(places.map((place) => enqueue(-place - 1))); // opens the connections
  const began = now();
  await Promise.all(
    places.map(async (place) => {
      for (let number = 1; number <= each; number++) await enqueue(place * each + number);
    }),
  );
  say({ rate: (each * PRODUCERS) / (now() - began) });
}

// [what, DSN, count] of the command line.
export function command() {
  const [what, dsn, count] = process.argv.slice(2);
  return [what, dsn, Number(count ?? 0)];
}
