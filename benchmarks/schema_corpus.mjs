// The JSON schemas of zod's types, written by zod 4 itself and, for zod 3, by zod-to-json-schema. Prints them as JSON.

import * as z from "zod";
import { z as z3 } from "zod3";
import { zodToJsonSchema } from "zod-to-json-schema";

const person = z.object({ name: z.string(), get children() { return z.array(person); } });
const zod4 = {
  string: z.string(), min: z.string().min(3), max: z.string().max(5), length: z.string().length(4), nonempty: z.string().nonempty(),
  regex: z.string().regex(/^[a-z]+\/\d{2}\-x$/), startsWith: z.string().startsWith("ab."), endsWith: z.string().endsWith("yz"),
  includes: z.string().includes("mid"), uppercase: z.string().uppercase(), lowercase: z.string().lowercase(), trim: z.string().trim(),
  toLowerCase: z.string().toLowerCase(), toUpperCase: z.string().toUpperCase(), normalize: z.string().normalize(),
  checks: z.string().min(2).max(9).regex(/^a/).regex(/z$/), email: z.email(), emailHtml5: z.email({ pattern: z.regexes.html5Email }),
  emailRfc5322: z.email({ pattern: z.regexes.rfc5322Email }), emailUnicode: z.email({ pattern: z.regexes.unicodeEmail }), uuid: z.uuid(),
  uuidv4: z.uuidv4(), uuidv6: z.uuidv6(), uuidv7: z.uuidv7(), guid: z.guid(), url: z.url(), httpUrl: z.httpUrl(), hostname: z.hostname(),
  emoji: z.emoji(), base64: z.base64(), base64url: z.base64url(), hex: z.hex(), jwt: z.jwt(), nanoid: z.nanoid(), cuid: z.cuid(),
  cuid2: z.cuid2(), ulid: z.ulid(), xid: z.xid(), ksuid: z.ksuid(), ipv4: z.ipv4(), ipv6: z.ipv6(), mac: z.mac(), cidrv4: z.cidrv4(),
  cidrv6: z.cidrv6(), e164: z.e164(), creditCard: z.creditCard(), iban: z.iban(), currencyCode: z.currencyCode(), isoDate: z.iso.date(),
  isoTime: z.iso.time(), isoDateTime: z.iso.datetime(), isoDuration: z.iso.duration(),
  isoDateTimeOffset: z.iso.datetime({ offset: true, local: true, precision: 3 }), md5: z.hash("md5"), sha1: z.hash("sha1"),
  sha256: z.hash("sha256"), sha384: z.hash("sha384"), sha512: z.hash("sha512"), sha256Base64: z.hash("sha256", { enc: "base64" }),
  sha1Base64url: z.hash("sha1", { enc: "base64url" }), stringFormat: z.stringFormat("cool-id", /^cool-/),
  templateLiteral: z.templateLiteral(["v", z.number(), ".", z.enum(["a", "b"])]),
  number: z.number(), numberMin: z.number().min(1.5), numberMax: z.number().max(9.25), gt: z.number().gt(0), lt: z.number().lt(1),
  positive: z.number().positive(), nonnegative: z.number().nonnegative(), negative: z.number().negative(),
  nonpositive: z.number().nonpositive(), multipleOf: z.number().multipleOf(0.5), step: z.number().step(5), int: z.int(),
  numberInt: z.number().int(), int32: z.int32(), uint32: z.uint32(), float32: z.float32(), float64: z.float64(), bigint: z.bigint(),
  int64: z.int64(), nan: z.nan(), boolean: z.boolean(), stringbool: z.stringbool(), null: z.null(), undefined: z.undefined(),
  void: z.void(), any: z.any(), unknown: z.unknown(), never: z.never(), date: z.date(), symbol: z.symbol(), literal: z.literal("a"),
  literals: z.literal(["a", 1, true]), literalNull: z.literal(null), enum: z.enum(["a", "b"]), nativeEnum: z.enum({ A: 0, B: "b" }),
  object: z.object({ a: z.string(), b: z.number().optional() }), strictObject: z.strictObject({ a: z.string() }),
  looseObject: z.looseObject({ a: z.string() }), catchall: z.object({ a: z.string() }).catchall(z.number()), empty: z.object({}),
  partial: z.object({ a: z.string(), b: z.int() }).partial(), extend: z.object({ a: z.string() }).extend({ b: z.boolean() }),
  nested: z.object({ o: z.object({ x: z.array(z.object({ y: z.boolean() })) }) }), keyof: z.object({ a: z.string(), b: z.string() }).keyof(),
  array: z.array(z.string()), arrayMin: z.array(z.int32()).min(1), arrayMax: z.array(z.boolean()).max(3),
  arrayLength: z.array(z.boolean()).length(2), tuple: z.tuple([z.string(), z.int32()]), tupleRest: z.tuple([z.string()], z.boolean()),
  tupleOptional: z.tuple([z.string(), z.boolean().optional()]), record: z.record(z.string(), z.number()),
  recordAny: z.record(z.string(), z.any()), recordEnum: z.record(z.enum(["a", "b"]), z.boolean()),
  partialRecord: z.partialRecord(z.enum(["a", "b"]), z.boolean()), recordRegex: z.record(z.string().regex(/^k\d$/), z.boolean()),
  recordLength: z.record(z.string().min(2).max(4), z.boolean()), recordUuid: z.record(z.uuid(), z.boolean()),
  recordNumber: z.record(z.number(), z.boolean()), looseRecord: z.looseRecord(z.string().regex(/^x-/), z.string()),
  recordOfRecord: z.record(z.string(), z.record(z.string(), z.boolean())), map: z.map(z.string(), z.number()), set: z.set(z.string()),
  file: z.file(), mime: z.file().mime("image/png"), union: z.union([z.string(), z.number()]),
  unionNull: z.union([z.object({ a: z.string() }), z.null()]), unionNever: z.union([z.string(), z.never()]),
  unionInObject: z.object({ a: z.union([z.never(), z.boolean()]), b: z.never().optional() }),
  discriminatedUnion: z.discriminatedUnion("k", [
    z.object({ k: z.literal("a"), n: z.boolean() }), z.object({ k: z.literal("b"), s: z.string() }),
  ]),
  xor: z.xor([z.string(), z.boolean()]), xorObjects: z.xor([z.object({ a: z.string() }), z.object({ b: z.string() })]),
  intersection: z.intersection(z.object({ a: z.string() }), z.object({ b: z.boolean() })),
  and: z.object({ a: z.string() }).and(z.object({ b: z.int32() })), optional: z.object({ a: z.string().optional() }),
  exactOptional: z.object({ a: z.exactOptional(z.string()) }), nullable: z.string().nullable(),
  nullish: z.object({ a: z.string().nullish() }), nonoptional: z.nonoptional(z.string().optional()),
  default: z.object({ a: z.string().default("x") }), prefault: z.object({ a: z.string().prefault("x") }),
  catch: z.object({ a: z.string().catch("x") }), readonly: z.object({ a: z.array(z.string()).readonly() }),
  describe: z.string().describe("a text"), meta: z.string().meta({ title: "T", examples: ["a"], deprecated: true, id: "Text" }),
  brand: z.string().brand("b"), refine: z.string().refine(() => true), pipe: z.string().pipe(z.string().min(2)),
  transform: z.string().transform((x) => x.length), preprocess: z.preprocess((x) => x, z.string()),
  codec: z.codec(z.string(), z.number(), { decode: Number, encode: String }), coerceString: z.coerce.string(),
  coerceNumber: z.coerce.number(), coerceBoolean: z.coerce.boolean(), promise: z.promise(z.string()), success: z.success(z.string()),
  lazy: z.lazy(() => z.string()), json: z.json(), instanceof: z.instanceof(Date), custom: z.custom(() => true), function: z.function(),
  recursive: person, property: z.object({ a: z.string() }).check(z.property("a", z.string())),
};

const category = z3.object({ name: z3.string(), sub: z3.lazy(() => category.array()) });
const shared = z3.object({ a: z3.string() });
const zod3 = {
  string: z3.string(), min: z3.string().min(3), max: z3.string().max(5), length: z3.string().length(4),
  regex: z3.string().regex(/^[a-z]+\/\d{2}\-x$/i), startsWith: z3.string().startsWith("ab."), endsWith: z3.string().endsWith("yz"),
  includes: z3.string().includes("mid"), email: z3.string().email(), url: z3.string().url(), emoji: z3.string().emoji(),
  uuid: z3.string().uuid(), nanoid: z3.string().nanoid(), cuid: z3.string().cuid(), cuid2: z3.string().cuid2(), ulid: z3.string().ulid(),
  base64: z3.string().base64(), base64url: z3.string().base64url(), jwt: z3.string().jwt(), ip: z3.string().ip(),
  ipv4: z3.string().ip({ version: "v4" }), ipv6: z3.string().ip({ version: "v6" }), cidr: z3.string().cidr(),
  datetime: z3.string().datetime(), date: z3.string().date(), time: z3.string().time(), duration: z3.string().duration(),
  trim: z3.string().trim(), toLowerCase: z3.string().toLowerCase(), twoPatterns: z3.string().regex(/^a/).regex(/z$/),
  number: z3.number(), int: z3.number().int(), gt: z3.number().gt(0), lte: z3.number().lte(4), multipleOf: z3.number().multipleOf(0.5),
  finite: z3.number().finite(), safe: z3.number().safe(), bigint: z3.bigint(), boolean: z3.boolean(), dateObject: z3.date(),
  symbol: z3.symbol(), undefined: z3.undefined(), null: z3.null(), void: z3.void(), any: z3.any(), unknown: z3.unknown(),
  never: z3.never(), nan: z3.nan(), literal: z3.literal("a"), enum: z3.enum(["a", "b"]), nativeEnum: z3.nativeEnum({ A: 0, B: "b" }),
  object: z3.object({ a: z3.string(), b: z3.number().optional() }), strict: z3.object({ a: z3.string() }).strict(),
  passthrough: z3.object({ a: z3.string() }).passthrough(), catchall: z3.object({ a: z3.string() }).catchall(z3.number()),
  undefinedProperty: z3.object({ a: z3.undefined(), b: z3.boolean() }), neverProperty: z3.object({ a: z3.never().optional(), b: z3.boolean() }),
  array: z3.array(z3.string()), arrayMin: z3.array(z3.boolean()).min(1), arrayLength: z3.array(z3.boolean()).length(2),
  nonempty: z3.array(z3.string()).nonempty(), arrayAny: z3.array(z3.any()), tuple: z3.tuple([z3.string(), z3.number()]),
  tupleRest: z3.tuple([z3.string()]).rest(z3.boolean()), record: z3.record(z3.string()), recordEnum: z3.record(z3.enum(["a", "b"]), z3.boolean()),
  recordRegex: z3.record(z3.string().regex(/^k\d$/), z3.boolean()), recordMin: z3.record(z3.string().min(2), z3.boolean()),
  recordUuid: z3.record(z3.string().uuid(), z3.boolean()), map: z3.map(z3.string(), z3.number()), mapEnum: z3.map(z3.enum(["a"]), z3.boolean()),
  set: z3.set(z3.string()), setMin: z3.set(z3.string()).min(1).max(3), function: z3.function(), union: z3.union([z3.string(), z3.number()]),
  unionUndefined: z3.union([z3.string(), z3.undefined()]), unionObjects: z3.union([z3.object({ a: z3.string() }), z3.null()]),
  unionLiterals: z3.union([z3.literal("a"), z3.literal(1)]),
  discriminatedUnion: z3.discriminatedUnion("k", [
    z3.object({ k: z3.literal("a"), n: z3.boolean() }), z3.object({ k: z3.literal("b"), s: z3.string() }),
  ]),
  intersection: z3.intersection(z3.object({ a: z3.string() }), z3.object({ b: z3.boolean() })),
  intersectionOfThree: z3.object({ a: z3.string() }).and(z3.object({ b: z3.boolean() })).and(z3.object({ c: z3.null() })),
  optional: z3.object({ a: z3.string().optional() }), nullable: z3.string().nullable(), nullableObject: z3.object({ a: z3.string() }).nullable(),
  default: z3.object({ a: z3.string().default("x") }), catch: z3.string().catch("x"), readonly: z3.string().readonly(),
  branded: z3.string().brand(), effects: z3.string().refine(() => true), transform: z3.string().transform((x) => x.length),
  pipeline: z3.string().pipe(z3.string().min(2)), promise: z3.promise(z3.string()), lazy: z3.lazy(() => z3.string()), recursive: category,
  coerce: z3.coerce.number(), preprocess: z3.preprocess((x) => x, z3.string()), reused: z3.object({ x: shared, y: shared }),
};

const out = {};

/** Write the schema of each type for each target, but for those that are the same as for the first target. */
function write(title, types, targets, schemaOf) {
  for (const [target, options] of Object.entries(targets)) {
    const group = (out[`${title}${target}`] = {});
    for (const [name, type] of Object.entries(types)) {
      try {
        const { $schema, ...schema } = schemaOf(type, options);
        const first = out[title]?.[name];
        if (!first || group === out[title] || JSON.stringify(first) !== JSON.stringify({ $schema: first.$schema, ...schema })) {
          group[name] = { $schema, ...schema };
        }
      } catch {} // zod has no JSON schema for this type
    }
  }
}

const drafts = Object.fromEntries(["draft-7", "draft-4", "openapi-3.0"].map((target) => [`, ${target}`, { target }]));
write("zod 4", zod4, { "": {}, ", input": { io: "input" }, ...drafts }, z.toJSONSchema);
const others = { ", 2019-09": { target: "jsonSchema2019-09" }, ", openApi3": { target: "openApi3" } };
write("zod 3", zod3, { "": {}, ...others }, zodToJsonSchema);
console.log(JSON.stringify(out));
