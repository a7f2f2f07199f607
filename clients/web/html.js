// Preact and htm, as every view has them.
import {Component, h, render} from "./vendor/preact.mjs";
import {useEffect, useLayoutEffect, useMemo, useRef, useState} from "./vendor/hooks.mjs";
import htm from "./vendor/htm.mjs";

export const html = htm.bind(h);
export {Component, h, render, useEffect, useLayoutEffect, useMemo, useRef, useState};

/** A component that is drawn again only when one of its properties is another one. */
export function memo(draw) {
  return class extends Component {
    shouldComponentUpdate(next) {
      const names = new Set([...Object.keys(next), ...Object.keys(this.props)]);
      return [...names].some((name) => next[name] !== this.props[name]);
    }
    render(props) {
      return draw(props);
    }
  };
}
