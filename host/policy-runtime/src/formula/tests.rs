use super::*;

fn refusal(text: &str) -> String {
    FormulaSettings::of_file(text, 0).unwrap_err()
}

#[test]
fn a_file_becomes_the_settings_of_both_components_with_the_hashes_of_its_names() {
    let text = "cost = \"engine_queue\"\nkeep = \"tenant != 'batch'\"\n\
                shed = { when = \"min(engine_queue) > 40\", status = 503 }\n";
    let settings = FormulaSettings::of_file(text, 9).unwrap();
    let parsed = |text: &Option<String>| serde_json::from_str::<Value>(text.as_ref().unwrap()).unwrap();
    let hash = name_hash(b"batch", 9);
    assert_eq!(parsed(&settings.keep), json!({ "keep": "tenant != 'batch'", "names": { "batch": hash } }));
    let shed = json!({ "when": "min(engine_queue) > 40", "status": 503 });
    assert_eq!(parsed(&settings.rank), json!({ "cost": "engine_queue", "shed": shed, "names": {} }));
    let only = FormulaSettings::of_file("keep = '''\nkv_usage\n < 0.9'''", 0).unwrap();
    assert!(only.keep.is_some() && only.rank.is_none(), "{only:?}");
}

#[test]
fn a_mistake_has_its_line_and_column_in_the_file() {
    let cases = [
        (
            "# mine\ncost = \"2 * engine_que\"",
            "line 2, column 13: cost: unknown name `engine_que`; did you mean `engine_queue`?",
        ),
        (
            "keep = '''\ntrue &&\n kv_usag < 1'''",
            "line 3, column 2: keep: unknown name `kv_usag`; did you mean `kv_usage`?",
        ),
        (
            "cost = \"1 +\"",
            "line 1, column 12: cost: expected a number, a fact, a function, a text or `(` after `+`; found the end of \
             the formula",
        ),
        ("cost = \"1 +\\t x\"", "line 1, column 8: cost: column 6: unknown name `x`"),
        ("cost = \"1\"\nshed = { when = \"kv_usage > 1\" }", "line 2, column 27: shed.when: each candidate"),
        (
            "cost = \"1\"\nshed = { when = \"true\" }",
            "line 2, column 17: shed.when: it holds for an idle fleet",
        ),
        (
            "cost = \"1\"\nshed = { when = \"false\", status = 500 }",
            "line 2, column 35: shed.status: 500 is not",
        ),
        ("cots = \"1\"", "line 1, column 1: unknown field `cots`, expected one of `cost`, `keep`, `shed`"),
        ("cost = 1", "line 1, column 8: invalid type: integer `1`, expected a string"),
        ("cost = \"1", "line 1, column "),
        (
            "cost = \"1\"\nshed = \"false\"",
            "line 2, column 8: invalid type: string \"false\", expected a table such as { when = \"min(engine_queue) > 8\" }",
        ),
        ("shed = { when = \"false\" }", "line 1, column 17: `shed` needs a formula `cost` beside it"),
        ("", "line 1, column 1: neither `cost` nor `keep` is there"),
        ("keep = \"engine_queue > 4\"", "line 1, column 8: keep: it keeps no worker of an idle fleet"),
    ];
    for (text, wanted) in cases {
        let found = refusal(text);
        assert!(found.starts_with(wanted), "{text}: {found}");
    }
}
