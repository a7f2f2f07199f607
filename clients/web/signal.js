// A value that notifies its listeners when it changes.
import {useEffect, useState} from "./html.js";

export class Signal {
  #listeners = new Set();

  /** value: what listeners are told; without one, this itself. */
  constructor(value = undefined) {
    this.value = value;
  }

  set(value) {
    if (value === this.value) return;
    this.value = value;
    this.tell();
  }

  tell(news = this.value === undefined ? this : this.value) {
    for (const listener of [...this.#listeners]) listener(news);
  }

  /** Calls back at every change, until what this returns is called. */
  listen(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }
}

/** The value in a component, which is drawn again when `pick` of it is another one. */
export function use(signal, pick = (value) => value) {
  const [, draw] = useState(0);
  const picked = pick(signal.value);
  useEffect(() => {
    let seen = picked;
    const look = (value) => {
      const now = pick(value);
      if (now !== seen) {
        seen = now;
        draw((n) => n + 1);
      }
    };
    look(signal.value); // what changed between the drawing and now
    return signal.listen(look);
  }, [signal]);
  return picked;
}

export function useChanges(source) {
  const [, draw] = useState(0);
  useEffect(() => source?.listen(() => draw((n) => n + 1)), [source]);
}
