// Names of characters in HTML: the 96 of Latin-1, Greek, and signs that people write.

const LATIN =
  "nbsp iexcl cent pound curren yen brvbar sect uml copy ordf laquo not shy reg macr deg plusmn sup2 sup3 acute micro " +
  "para middot cedil sup1 ordm raquo frac14 frac12 frac34 iquest Agrave Aacute Acirc Atilde Auml Aring AElig Ccedil " +
  "Egrave Eacute Ecirc Euml Igrave Iacute Icirc Iuml ETH Ntilde Ograve Oacute Ocirc Otilde Ouml times Oslash Ugrave " +
  "Uacute Ucirc Uuml Yacute THORN szlig agrave aacute acirc atilde auml aring aelig ccedil egrave eacute ecirc euml " +
  "igrave iacute icirc iuml eth ntilde ograve oacute ocirc otilde ouml divide oslash ugrave uacute ucirc uuml yacute " +
  "thorn yuml";
const OTHERS =
  "quot \u0022|amp &|lt <|gt >|apos '|OElig Œ|oelig œ|Scaron Š|scaron š|Yuml Ÿ|Dcaron Ď|fnof ƒ|circ ˆ|tilde ˜|Alpha Α" +
  "|Beta Β|Gamma Γ|Delta Δ|Epsilon Ε|Zeta Ζ|Eta Η|Theta Θ|Iota Ι|Kappa Κ|Lambda Λ|Mu Μ|Nu Ν|Xi Ξ|Omicron Ο|Pi Π|Rho Ρ" +
  "|Sigma Σ|Tau Τ|Upsilon Υ|Phi Φ|Chi Χ|Psi Ψ|Omega Ω|alpha α|beta β|gamma γ|delta δ|epsilon ε|zeta ζ|eta η|theta θ" +
  "|iota ι|kappa κ|lambda λ|mu μ|nu ν|xi ξ|omicron ο|pi π|rho ρ|sigmaf ς|sigma σ|tau τ|upsilon υ|phi φ|chi χ|psi ψ" +
  "|omega ω|thetasym ϑ|upsih ϒ|piv ϖ|ensp \u2002|emsp \u2003|thinsp \u2009|zwnj \u200c|zwj \u200d|lrm \u200e|rlm \u200f" +
  "|ndash –|mdash —|lsquo ‘|rsquo ’|sbquo ‚|ldquo “|rdquo ”|bdquo „|dagger †|Dagger ‡|bull •|hellip …|permil ‰|prime ′" +
  "|Prime ″|lsaquo ‹|rsaquo ›|oline ‾|frasl ⁄|euro €|image ℑ|weierp ℘|real ℜ|trade ™|alefsym ℵ|larr ←|uarr ↑|rarr →" +
  "|darr ↓|harr ↔|crarr ↵|lArr ⇐|uArr ⇑|rArr ⇒|dArr ⇓|hArr ⇔|forall ∀|part ∂|exist ∃|empty ∅|nabla ∇|isin ∈|notin ∉" +
  "|ni ∋|prod ∏|sum ∑|minus −|lowast ∗|radic √|prop ∝|infin ∞|ang ∠|and ∧|or ∨|cap ∩|cup ∪|int ∫|there4 ∴|sim ∼|cong ≅" +
  "|asymp ≈|ne ≠|equiv ≡|le ≤|ge ≥|sub ⊂|sup ⊃|nsub ⊄|sube ⊆|supe ⊇|oplus ⊕|otimes ⊗|perp ⊥|sdot ⋅|lceil ⌈|rceil ⌉" +
  "|lfloor ⌊|rfloor ⌋|lang ⟨|rang ⟩|loz ◊|spades ♠|clubs ♣|hearts ♥|diams ♦|check ✓|cross ✗|star ☆";

const NAMED = new Map([
  ...LATIN.split(" ").map((name, i) => [name, String.fromCharCode(160 + i)]),
  ...OTHERS.split("|").map((one) => one.split(" ")),
]);

/** What "&amp;" or "&#38;" stands for, or undefined. */
export function entity(text) {
  if (text[1] !== "#") return NAMED.get(text.slice(1, -1));
  const code = /^x/i.test(text[2]) ? parseInt(text.slice(3, -1), 16) : parseInt(text.slice(2, -1), 10);
  return code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code < 0xe000) ? String.fromCodePoint(code) : "\ufffd";
}
