"""A hundred JSON schemas of growing difficulty whose documents are bounded in length, so that every output ends."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

WORD: Schema = {"type": "string", "maxLength": 12}
NUMBER: Schema = {"type": "integer", "minimum": 0, "maximum": 999}


def record(properties: dict[str, Schema], required: list[str] | None = None) -> Schema:
    """An object with these members and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def a_list(items: Schema, at_most: int, at_least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": at_least, "maxItems": at_most}


def nested(depth: int, leaf: Schema) -> Schema:
    return leaf if depth == 0 else record({f"level_{depth}": nested(depth - 1, leaf)})


def schemas() -> list[Schema]:
    """From single values over records and lists to alternatives, references and deep nesting."""
    leaves: list[Schema] = [
        {"type": "boolean"},
        {"type": "null"},
        NUMBER,
        {"type": "integer", "minimum": -20, "maximum": -3},
        {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
        WORD,
        {"type": "string", "minLength": 3, "maxLength": 5},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        {"type": "string", "pattern": "^(red|green|blue)+$", "maxLength": 12},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "uuid"},
        {"enum": ["small", "large"]},
        {"enum": ["naïve", "東京", "👍🏽", 'a "quoted" \\ text', "line\nbreak"]},
        {"enum": [1, "1", None, True]},
        {"const": "fixed"},
        {"const": {"a": [1, 2, {"b": None}]}},
    ]
    simple = [record({"value": leaf}) for leaf in leaves]
    wide = [
        record({f"{name}_{i}": leaves[(i * 3 + n) % len(leaves)] for i in range(n)})
        for n, name in enumerate(["a", "first", "the name", "ключ", 'q"uote', "x", "yy", "zzz"], start=2)
    ]
    optional = [record({"id": NUMBER, "note": WORD, "tag": leaves[i]}, required=["id"]) for i in range(12)]
    lists = [record({"items": a_list(leaf, at_most=3, at_least=i % 2)}) for i, leaf in enumerate(leaves)]
    matrices = [record({"rows": a_list(a_list(NUMBER, n, n), n, n)}) for n in range(1, 5)]
    deep = [nested(depth, leaves[depth % len(leaves)]) for depth in range(2, 14)]
    alternatives = [
        record({"either": {"anyOf": [leaves[i], record({"kind": {"const": i}, "value": leaves[-1 - i]})]}})
        for i in range(len(leaves))
    ]
    people = [
        record(
            {
                "name": {"type": "string", "minLength": 1, "maxLength": 16},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "address": record({"street": WORD, "city": WORD, "code": {"type": "string", "pattern": "^[0-9]{5}$"}}),
                "friends": a_list(record({"name": WORD, "since": {"type": "string", "format": "date"}}), at_most=n),
                "role": {"enum": ["admin", "user", "guest"]},
            }
        )
        for n in range(1, 7)
    ]
    referring = [
        {
            "$defs": {"node": record({"label": WORD, "weight": NUMBER})},
            **record({f"node_{i}": {"$ref": "#/$defs/node"} for i in range(n)}),
        }
        for n in range(1, 7)
    ]
    nullable = [record({"maybe": {"type": ["string", "null"], "maxLength": n}}) for n in range(1, 5)]
    made = simple + wide + optional + lists + matrices + deep + alternatives + people + referring + nullable
    assert len(made) == 100, len(made)
    return made
