// Tells a server that restarts from one that is lost: it said so before it went.

const RESTART_MS = 60_000; // a server that is away for longer does not come back by itself

export class Restart {
  constructor(now = () => performance.now()) {
    this.now = now;
    this.saidAt = null;
  }

  /** The server was heard, and is on its way to its end or is not. */
  note(isDraining) {
    this.saidAt = isDraining ? this.now() : null;
  }

  /** Whether a server that cannot be heard is expected to be back soon. */
  get isUnderWay() {
    return this.saidAt !== null && this.now() - this.saidAt < RESTART_MS;
  }
}
