// Formulas: the TeX that people write to MathML, which browsers draw. What is not known here is left as it was written.
import {h} from "./html.js";

const TOKEN = /\\(?:operatorname\*|[a-zA-Z]+|[^])|\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|\s+|[^]/gu;
const LONGEST = 5000; // characters
const DEEPEST = 40;

/** "name sign name sign …" as a map. */
const table = (text) => {
  const words = text.trim().split(/\s+/);
  return new Map(words.flatMap((word, i) => (i % 2 ? [[words[i - 1], word]] : [])));
};
const set = (text) => new Set(text.trim().split(/\s+/));

const LETTERS = table(`alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ
  nu ν xi ξ pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω
  Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω
  infty ∞ partial ∂ nabla ∇ hbar ℏ ell ℓ Re ℜ Im ℑ aleph ℵ wp ℘ emptyset ∅ varnothing ∅ imath ı jmath ȷ degree ° top ⊤ bot ⊥
  ldots … dots … cdots ⋯ vdots ⋮ ddots ⋱ dotsc … dotsb ⋯ angle ∠ triangle △ square □ Box □ blacksquare ■ checkmark ✓ star ⋆ forall ∀ exists ∃ nexists ∄`);
const SIGNS = table(`times × cdot ⋅ div ÷ pm ± mp ∓ ast ∗ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ wedge ∧ land ∧ vee ∨ lor ∨ cap ∩ cup ∪
  setminus ∖ backslash \\ neg ¬ lnot ¬ le ≤ leq ≤ leqslant ⩽ ge ≥ geq ≥ geqslant ⩾ ne ≠ neq ≠ ll ≪ gg ≫ equiv ≡ approx ≈ sim ∼ simeq ≃ cong ≅ propto ∝
  prec ≺ succ ≻ in ∈ notin ∉ ni ∋ subset ⊂ supset ⊃ subseteq ⊆ supseteq ⊇ subsetneq ⊊ perp ⊥ parallel ∥ mid ∣ nmid ∤ vdash ⊢ models ⊨ doteq ≐
  to → rightarrow → gets ← leftarrow ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ implies ⟹ impliedby ⟸ iff ⟺ mapsto ↦ longrightarrow ⟶
  longleftarrow ⟵ Longrightarrow ⟹ Longleftrightarrow ⟺ longmapsto ⟼ uparrow ↑ downarrow ↓ Uparrow ⇑ Downarrow ⇓ rightleftharpoons ⇌ hookrightarrow ↪
  nearrow ↗ searrow ↘ therefore ∴ because ∵ colon : prime ′ dagger † triangleq ≜ coloneqq ≔ bmod mod lesssim ≲ gtrsim ≳ asymp ≍ ltimes ⋉ rtimes ⋊`);
const SUMS = table("sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀ bigsqcup ⨆");
const INTEGRALS = table("int ∫ iint ∬ iiint ∭ oint ∮");
const FENCES = table(`{ { } } | ‖ lbrace { rbrace } lbrack [ rbrack ] langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ vert | Vert ‖ lvert | rvert | lVert ‖ rVert ‖`);
const NAMES = set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp det dim ker deg arg hom gcd lcm tr rank sgn diag");
const LIMITS = set("lim max min sup inf limsup liminf argmax argmin Pr");
const SPACES = table(", 0.167em : 0.222em > 0.222em ; 0.278em ! -0.167em quad 1em qquad 2em enspace 0.5em thinspace 0.167em");
const ACCENTS = table("hat ^ widehat ^ bar ¯ overline ¯ vec → overrightarrow → dot ˙ ddot ¨ tilde ~ widetilde ~ check ˇ breve ˘ acute ´ grave ` overbrace ⏞");
const UNDER = table("underline _ underbrace ⏟");
const STRETCHED = set("widehat overline overrightarrow widetilde overbrace underline underbrace");
const FONTS = {mathbb: [0x1d538, 0x1d552, 0x1d7d8], mathcal: [0x1d49c, 0x1d4b6], mathscr: [0x1d49c, 0x1d4b6], mathfrak: [0x1d504, 0x1d51e], mathbf: [0x1d400, 0x1d41a, 0x1d7ce], mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2], mathtt: [0x1d670, 0x1d68a, 0x1d7f6], boldsymbol: [0x1d468, 0x1d482, 0x1d7ce], bm: [0x1d468, 0x1d482, 0x1d7ce]};
/** Letters that stood in Unicode before these alphabets did. */
const ELSEWHERE = table("𝔺 ℂ 𝔿 ℍ 𝕅 ℕ 𝕇 ℙ 𝕈 ℚ 𝕉 ℝ 𝕑 ℤ 𝒝 ℬ 𝒠 ℰ 𝒡 ℱ 𝒣 ℋ 𝒤 ℐ 𝒧 ℒ 𝒨 ℳ 𝒭 ℛ 𝒺 ℯ 𝒼 ℊ 𝓄 ℴ 𝔆 ℭ 𝔋 ℌ 𝔌 ℑ 𝔍 ℑ 𝔕 ℜ 𝔝 ℨ");
ELSEWHERE.delete("𝔍"); // it is there
const UPRIGHT = set("text textrm textnormal textbf textit texttt textsf mbox hbox mathrm operatorname operatorname* mathit");
const ROWS = {matrix: ["", ""], smallmatrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"], cases: ["{", ""], array: ["", ""], aligned: ["", ""], align: ["", ""], alignat: ["", ""], split: ["", ""], gathered: ["", ""], gather: ["", ""], equation: ["", ""], multline: ["", ""], eqnarray: ["", ""]};
const LEFT = set("cases array");
const NOTHING = set("displaystyle textstyle scriptstyle limits nolimits label nonumber notag left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr hline");

class Unknown extends Error {}

/** A formula as a vnode, or null if it has anything that is not known here. */
export function formula(text, display = false) {
  if (text.length > LONGEST) return null;
  try {
    return h("math", {display: display ? "block" : undefined, title: text}, new Tex(text).whole());
  } catch (error) {
    if (error instanceof Unknown) return null;
    throw error;
  }
}

const row = (nodes) => (nodes.length === 1 ? nodes[0] : h("mrow", null, nodes));
const sign = (text, more) => h("mo", more, text);
const space = (width) => h("mspace", {width});

class Tex {
  #tokens;
  #at = 0;
  #depth = 0;

  constructor(text) {
    this.#tokens = text.match(TOKEN) ?? [];
  }

  whole() {
    const node = this.#lines([]);
    if (this.#at < this.#tokens.length) throw new Unknown(this.#tokens[this.#at]);
    return node;
  }

  /** What comes next that is no space. */
  #peek() {
    while (/^\s/.test(this.#tokens[this.#at] ?? "")) this.#at++;
    return this.#tokens[this.#at];
  }

  #take() {
    const token = this.#peek();
    if (token === undefined) throw new Unknown("the end");
    this.#at++;
    return token;
  }

  /** Rows and columns, until one of the ends. */
  #lines(ends, kind = "") {
    const rows = [[[]]];
    for (let token; (token = this.#peek()) !== undefined && !ends.includes(token); ) {
      if (token === "\\\\" || token === "\\cr" || token === "\\newline") {
        this.#at++;
        if (this.#peek() === "[") while (this.#take() !== "]");
        rows.push([[]]);
      } else if (token === "&") {
        this.#at++;
        rows.at(-1).push([]);
      } else rows.at(-1).at(-1).push(...this.#scripted());
    }
    if (rows.length > 1 && rows.at(-1).length === 1 && !rows.at(-1)[0].length) rows.pop();
    if (rows.length === 1 && rows[0].length === 1 && !kind) return row(rows[0][0]);
    const align = (i) => ({textAlign: LEFT.has(kind) ? "left" : /^(align|split|eqnarray)/.test(kind) || !kind ? (i % 2 ? "left" : "right") : "center"});
    const pad = (i) => (/^(align|split|)$|^align/.test(kind) ? {paddingLeft: i % 2 ? "0" : undefined, paddingRight: i % 2 ? undefined : "0"} : {});
    return h("mtable", {displaystyle: /matrix|cases|array/.test(kind) ? undefined : "true"},
      rows.map((cells) => h("mtr", null, cells.map((cell, i) => h("mtd", {style: {...align(i), ...pad(i)}}, row(cell))))));
  }

  #deeper(read) {
    if (++this.#depth > DEEPEST) throw new Unknown("too deep");
    const node = read();
    this.#depth--;
    return node;
  }

  /** What is in braces, or the one token that is there. */
  #argument() {
    return this.#deeper(() => {
      if (this.#peek() !== "{") return row(this.#atom(this.#take()).nodes);
      this.#at++;
      const node = this.#lines(["}"]);
      this.#expect("}");
      return node;
    });
  }

  /** Of "12", that two stand in one behind the other, the first digit, else null. */
  #digit() {
    const token = this.#peek() ?? "";
    if (!/^\d/.test(token)) return null;
    if (token.length > 1) this.#tokens[this.#at] = token.slice(1);
    else this.#at++;
    return h("mn", null, token[0]);
  }

  #expect(token) {
    if (this.#take() !== token) throw new Unknown(`no ${token}`);
  }

  /** What is in braces, as it is written. */
  #raw() {
    if (this.#peek() !== "{") return this.#take();
    let [text, open] = ["", 1];
    for (this.#at++; ; this.#at++) {
      const token = this.#tokens[this.#at];
      if (token === undefined) throw new Unknown("no }");
      if (token === "{") open++;
      else if (token === "}" && --open === 0) break;
      text += token;
    }
    this.#at++;
    return text;
  }

  /** An atom with what stands below and above it. */
  #scripted() {
    const {nodes, limits = false, stands = false} = this.#atom(this.#take());
    if (!nodes.length && !"^_".includes(this.#peek() ?? " ")) return nodes;
    let [below, above, primes] = [null, null, ""];
    for (let token; (token = this.#peek()); ) {
      if (token === "\\limits" || token === "\\nolimits") this.#at++;
      else if (token === "'") primes += (this.#at++, "′");
      else if (token === "_" && !below) below = (this.#at++, this.#argument());
      else if (token === "^" && !above) above = (this.#at++, this.#argument());
      else break;
    }
    if (primes) above = above ? row([sign(primes), above]) : sign(primes);
    const base = row(nodes);
    let made = nodes;
    if (below && above) made = [h(limits ? "munderover" : "msubsup", null, base, below, above)];
    else if (below) made = [h(limits ? "munder" : "msub", null, base, below)];
    else if (above) made = [h(limits ? "mover" : "msup", null, base, above)];
    return stands && !/^(?:[([|^_]|\\left|\\big.*)$/.test(this.#peek() ?? "(") ? [...made, space("0.167em")] : made;
  }

  /** {nodes, limits: scripts stand below and above, stands: a name with a space behind it}. */
  #atom(token) {
    const one = (node, more) => ({nodes: [node], ...more});
    if (token[0] !== "\\") {
      if (/^\d/.test(token)) return one(h("mn", null, token));
      if (token === "{") return (this.#at--, one(this.#argument()));
      if (token === "^" || token === "_") return (this.#at--, {nodes: []});
      if (token === "'") return one(sign("′"));
      if (token === "~") return one(space("0.333em"));
      if ("}&$#%".includes(token)) throw new Unknown(token);
      if (/\p{L}/u.test(token)) return one(h("mi", null, token));
      if (token === "-") return one(sign("−"));
      if (token === "|") return one(sign("|", {stretchy: "false", lspace: "0", rspace: "0"}));
      return one(sign(token, /[()[\]]/.test(token) ? {stretchy: "false"} : token === "/" ? {lspace: "0", rspace: "0"} : null));
    }
    const name = token.slice(1);
    if (LETTERS.has(name)) return one(h("mi", null, LETTERS.get(name)));
    if (SIGNS.has(name)) return one(sign(SIGNS.get(name)));
    if (SUMS.has(name)) return one(sign(SUMS.get(name), {movablelimits: "true"}), {limits: true});
    if (INTEGRALS.has(name)) return one(sign(INTEGRALS.get(name)));
    if (NAMES.has(name)) return one(h("mi", null, name), {stands: true});
    if (LIMITS.has(name)) return one(sign(name.replace(/^(lim|arg)(?=.)/, "$1 "), {movablelimits: "true", lspace: "0", rspace: "0.167em"}), {limits: true});
    if (SPACES.has(name)) return one(space(SPACES.get(name)));
    if (FENCES.has(name)) return one(sign(FENCES.get(name), {stretchy: "false"}));
    if (ACCENTS.has(name)) return one(h("mover", {accent: "true"}, this.#argument(), sign(ACCENTS.get(name), {stretchy: String(STRETCHED.has(name))})), {limits: name === "overbrace"});
    if (UNDER.has(name)) return one(h("munder", {accentunder: "true"}, this.#argument(), sign(UNDER.get(name))), {limits: name === "underbrace"});
    if (Object.hasOwn(FONTS, name)) return one(this.#lettered(FONTS[name]));
    if (UPRIGHT.has(name)) return this.#words(name);
    switch (name) {
      case " ":
        return one(space("0.333em"));
      case "%":
      case "$":
      case "#":
      case "&":
      case "_":
        return one(h("mi", null, name));
      case "frac":
      case "tfrac":
      case "dfrac":
      case "cfrac": {
        const [above, below] = [this.#digit() ?? this.#argument(), this.#digit() ?? this.#argument()];
        return one(h("mfrac", {displaystyle: name === "dfrac" || name === "cfrac" ? "true" : undefined}, above, below));
      }
      case "binom":
      case "tbinom":
      case "dbinom":
        return one(h("mrow", null, sign("("), h("mfrac", {linethickness: "0"}, this.#argument(), this.#argument()), sign(")")));
      case "sqrt": {
        if (this.#peek() !== "[") return one(h("msqrt", null, this.#argument()));
        this.#at++;
        const root = this.#deeper(() => this.#lines(["]"]));
        this.#expect("]");
        return one(h("mroot", null, this.#argument(), root));
      }
      case "left":
        return one(this.#fenced());
      case "middle":
        return one(this.#fence());
      case "begin":
        return one(this.#environment());
      case "overset":
      case "stackrel": {
        const above = this.#argument();
        return one(h("mover", null, this.#argument(), above));
      }
      case "underset": {
        const below = this.#argument();
        return one(h("munder", null, this.#argument(), below));
      }
      case "xrightarrow":
        return one(h("mover", null, sign("→", {stretchy: "true"}), this.#argument()));
      case "substack":
      case "mathop":
      case "mathbin":
      case "mathrel":
      case "mathord":
      case "ensuremath":
        return one(this.#argument(), {limits: name === "mathop"});
      case "boxed":
      case "fbox":
        return one(h("mrow", {class: "boxed"}, this.#argument()));
      case "color":
      case "textcolor":
        this.#raw();
        return name === "color" ? {nodes: []} : one(this.#argument());
      case "not": {
        const struck = this.#atom(this.#take()).nodes[0]?.props.children;
        if (typeof struck !== "string") throw new Unknown("no sign");
        return one(sign(`${struck}\u0338`));
      }
      case "pmod":
        return one(h("mrow", null, space("0.444em"), sign("("), h("mi", null, "mod"), space("0.333em"), this.#argument(), sign(")")));
      case "tag":
        return one(h("mtext", null, `\u2003(${this.#raw()})`));
      case "label":
        this.#raw();
        return {nodes: []};
    }
    if (/^(?:big|Big|bigg|Bigg)[lrm]?$/.test(name)) return one(this.#fence(/^b/.test(name) ? "1.4em" : "2em"));
    if (NOTHING.has(name)) return {nodes: []};
    throw new Unknown(token);
  }

  /** A fence at its size; "." is none. */
  #fence(size) {
    const token = this.#take();
    const text = token[0] === "\\" ? (FENCES.get(token.slice(1)) ?? SIGNS.get(token.slice(1))) : token;
    if (!text || (text.length > 1 && token[0] !== "\\")) throw new Unknown(token);
    if (text === ".") return h("mrow", null);
    return sign({"<": "⟨", ">": "⟩"}[text] ?? text, {stretchy: "true", symmetric: "true", fence: "true", minsize: size, maxsize: size});
  }

  #fenced() {
    const open = this.#fence();
    const inner = this.#deeper(() => this.#lines(["\\right"]));
    this.#expect("\\right");
    return h("mrow", null, open, inner, this.#fence());
  }

  #environment() {
    const name = this.#raw();
    const kind = name.replace("*", "");
    const fences = Object.hasOwn(ROWS, kind) ? ROWS[kind] : null;
    if (!fences) throw new Unknown(name);
    if (/^(array|alignat)/.test(name) && this.#peek() === "{") this.#raw();
    const body = this.#deeper(() => this.#lines(["\\end"], kind));
    this.#expect("\\end");
    if (this.#raw() !== name) throw new Unknown(name);
    const [open, close] = fences.map((text) => text && sign(text, {stretchy: "true", symmetric: "true", fence: "true"}));
    return open ? h("mrow", null, open, body, close || h("mrow", null)) : body;
  }

  /** Upright words; a formula between dollars in them is not known. */
  #words(name) {
    const text = this.#raw();
    const words = text.replace(/\\([ ,;:!%#&_$])/g, (_, c) => ("%#&_$".includes(c) ? c : " "));
    if (/[\\${}]/.test(words.replace(/\\\$/g, ""))) throw new Unknown(text);
    const css = {textbf: {fontWeight: "bold"}, textit: {fontStyle: "italic"}, mathit: {fontStyle: "italic"}, texttt: {fontFamily: "monospace"}}[name];
    if (/^(mathrm|operatorname)/.test(name)) return {nodes: [h("mi", {mathvariant: "normal"}, words)], stands: name !== "mathrm", limits: name === "operatorname*"};
    return {nodes: [h("mtext", {style: css}, words.replace(/^ | $/g, "\u00a0"))]};
  }

  /** Letters of another alphabet; what it has not stays. */
  #lettered([upper, lower, digit]) {
    const text = this.#raw();
    if (/[^\w\s,.()+=-]/.test(text)) {
      const [inner] = [new Tex(text)];
      if (text.length > 200) throw new Unknown(text);
      return h("mrow", {style: {fontWeight: "bold"}}, inner.#deeper(() => inner.#lines([])));
    }
    const of = (c) => {
      const from = /[A-Z]/.test(c) ? upper - 65 : /[a-z]/.test(c) ? lower - 97 : /\d/.test(c) && digit ? digit - 48 : 0;
      const made = from ? String.fromCodePoint(from + c.charCodeAt(0)) : c;
      return ELSEWHERE.get(made) ?? made;
    };
    return h("mi", null, [...text.trim()].map(of).join(""));
  }
}
