//! Reading cases: every kind of expectation, every type of fact, and the messages for malformed files.

use super::*;
use crate::{Plan, request_words, worker_words};

const ROWS: [(&str, &str, &str); 12] = [
    ("request", "prompt-tokens", "u32"),
    ("request", "block-size", "u32"),
    ("request", "n", "u32"),
    ("request", "priority", "f32"),
    ("request", "session-hash", "u64"),
    ("request", "tenant-hash", "u64"),
    ("request", "lora-hash", "u64"),
    ("worker", "worker-id", "u64"),
    ("worker", "dp-rank", "u32"),
    ("worker", "active-requests", "u32"),
    ("worker", "engine-queue", "u32"),
    ("worker", "kv-usage", "f32"),
];

fn table() -> FactTable {
    FactTable::new(ROWS)
}

fn one(case: &str) -> Result<Case, CasesError> {
    let text = format!("[[case]]\nname = \"c\"\n{case}\n");
    parse(&text, &table()).map(|cases| cases.into_iter().next().expect("one case"))
}

fn problem(case: &str) -> String {
    one(case).expect_err("malformed").to_string()
}

#[test]
fn every_kind_of_expectation_is_read_and_displayed() {
    let cases = [
        ("{ row = 2 }", Expect::Row(2), "row 2"),
        ("\"abstain\"", Expect::Abstain, "abstain"),
        ("{ costs = [1, 2.5] }", Expect::Costs(vec![1.0, 2.5]), "costs [1.0, 2.5]"),
        ("{ keep = [0, 3] }", Expect::Keep(vec![0, 3]), "keep [0, 3]"),
        ("{ plan = \"remote\" }", Expect::Plan(Plan::Remote), "plan remote"),
        ("{ plan = \"local\" }", Expect::Plan(Plan::Local), "plan local"),
        ("{ shed = 429 }", Expect::Shed(429), "shed 429"),
        ("{ refused = \"no\" }", Expect::Refused("no".to_owned()), "settings refused with \"no\""),
    ];
    for (text, expected, shown) in cases {
        let case = one(&format!("expect = {text}")).expect(text);
        assert_eq!(case.expect, expected);
        assert_eq!(case.expect.to_string(), shown);
    }
}

#[test]
fn words_are_in_the_order_that_the_policy_asked_for() {
    let case = one("seed = 9\nsettings = { a = 1.0, b = [true] }\n\
         request = { priority = 2, session-hash = 4294967298 }\n\
         rows = [{ dp-rank = 1, kv-usage = 0.5, \"label-is/zone=a\" = 1 }, { worker-id = 8589934595 }]\n\
         decode = { \"label-number/cost\" = 1.5 }\nexpect = { row = 0 }");
    let case = case.expect("well-formed");
    let facts = table();
    let request = ["session-hash", "n", "priority"].map(|name| (name, facts.request(name).expect(name)));
    let worker = ["worker-id", "kv-usage", "dp-rank", "label-is/zone=a", "label-number/cost"];
    let worker = worker.map(|name| (name, facts.worker(name).expect(name)));
    assert_eq!(request_words(request, &case.request), [2, 1, 1, 2.0_f32.to_bits()]);
    let half = 0.5_f32.to_bits();
    assert_eq!(worker_words(worker, &case.rows), [0, 3, 0, 2, half, 0, 1, 0, 1, 0, 0, 0]);
    let decode = worker_words(worker, std::slice::from_ref(&case.decode));
    assert_eq!(decode, [0, 0, 0, 0, 0, 1.5_f32.to_bits()]);
    assert_eq!((case.seed, case.settings.as_deref()), (9, Some(r#"{"a":1.0,"b":[true]}"#)));
}

#[test]
fn whole_numbers_keep_every_bit() {
    let case = one("request = { session-hash = 9007199254740993, tenant-hash = 9223372036854775807, \
         block-size = 4294967295, n = 2.0 }\nexpect = \"abstain\"");
    let facts = table();
    let wanted = ["session-hash", "tenant-hash", "block-size", "n"];
    let wanted = wanted.map(|name| (name, facts.request(name).expect(name)));
    let words = request_words(wanted, &case.expect("well-formed").request);
    assert_eq!(words, [1, 0x0020_0000, 0xffff_ffff, 0x7fff_ffff, 0xffff_ffff, 2]);
}

#[test]
fn t4_an_id_may_be_given_by_its_digits_in_quotes() {
    let case =
        one("rows = [{ worker-id = \"12349305675965833812\" }]\nexpect = { row = 0 }").expect("well-formed");
    let worker = [("worker-id", FactType::U64)];
    let halves = [12_349_305_675_965_833_812_u64 as u32, (12_349_305_675_965_833_812_u64 >> 32) as u32];
    // T4.9
    assert_eq!(worker_words(worker, &case.rows), halves);
    let wrong = problem("rows = [{ worker-id = \"one\" }]\nexpect = { row = 0 }");
    assert!(
        wrong.ends_with("rows[0].worker-id: expected a whole number, or its digits in quotes"),
        "{wrong}"
    );
    let large = problem("rows = [{ worker-id = 12349305675965833812 }]\nexpect = { row = 0 }");
    // T4.9
    assert!(large.ends_with("write a number above 9223372036854775807 in quotes\n"), "{large}");
}

#[test]
fn t4_facts_that_are_left_out_are_absent_or_the_gateway_s_default() {
    let case = one("rows = [{}]\nexpect = { row = 0 }").expect("well-formed");
    let request = ["n", "block-size", "priority"].map(|name| (name, FactType::U32));
    // T4.10
    assert_eq!(request_words(request, &case.request), [1, 16, 0]);
    let worker = ["load-age-ms", "engine-queue-known", "engine-queue"].map(|name| (name, FactType::U32));
    // T4.10
    assert_eq!(worker_words(worker, &case.rows), [0, 1, 0], "figures that are given are fresh");
}

#[test]
fn unknown_facts_are_named_and_the_closest_is_suggested() {
    let cases = [
        (
            "request = { prompt-token = 1 }",
            "request.prompt-token: unknown request fact; did you mean \"prompt-tokens\"?",
        ),
        (
            "request = { dp-rank = 1 }",
            "request.dp-rank: unknown request fact; `pointsman policy facts` lists all",
        ),
        (
            "rows = [{}, { activ-requests = 1 }]",
            "rows[1].activ-requests: unknown worker fact; did you mean \"active-requests\"?",
        ),
        (
            "decode = { block-size = 1 }",
            "decode.block-size: unknown worker fact; `pointsman policy facts` lists all",
        ),
        (
            "rows = [{ \"label-is/zone\" = 1 }]",
            "rows[0].label-is/zone: unknown worker fact; did you mean \"label-is/KEY=VALUE\"?",
        ),
    ];
    for (case, message) in cases {
        assert_eq!(problem(&format!("{case}\nexpect = \"abstain\"")), format!("case \"c\": {message}"));
    }
}

#[test]
fn a_value_that_does_not_fit_its_fact_is_reported() {
    let cases = [
        ("n = -1", "request.n: -1 is not a whole number from 0 to 4294967295"),
        ("n = 1.5", "request.n: 1.5 is not a whole number from 0 to 4294967295"),
        ("n = 4294967296", "request.n: 4294967296 is not a whole number from 0 to 4294967295"),
        ("lora-hash = -7", "request.lora-hash: -7 is not a whole number of 0 or more"),
        ("n = \"many\"", "request.n: expected a number"),
    ];
    for (value, message) in cases {
        let found = problem(&format!("request = {{ {value} }}\nexpect = \"abstain\""));
        assert_eq!(found, format!("case \"c\": {message}"));
    }
}

#[test]
fn t4_a_case_names_tenants_sessions_and_adapters() {
    let text = "settings = { pools = { \"tenant:acme\" = [\"tenant:x\", \"x\"] } }\n\
                request = { tenant-hash = \"tenant:acme\", session-hash = \"tenant:acme\", lora-hash = \"acme\" }\n\
                expect = { row = 0 }";
    let text = format!("[[case]]\nname = \"c\"\n{text}\n");
    let length = |name: &str| name.len() as u64;
    let cases = parse_hashing(&text, &table(), &length).expect("well-formed");
    // T4.5
    assert_eq!(cases[0].settings.as_deref(), Some(r#"{"pools":{"4":["1","x"]}}"#));
    let hash = |fact: &str| cases[0].request[fact];
    assert_eq!([hash("tenant-hash"), hash("session-hash"), hash("lora-hash")], [(4, 0), (11, 0), (4, 0)]);
    // T4.5: without a gateway's salt, names in settings and facts have the same hash.
    let cases = parse(&text, &table()).expect("well-formed");
    let (low, high) = cases[0].request["tenant-hash"];
    let number = u64::from(high) << 32 | u64::from(low);
    assert!(
        cases[0].settings.as_deref().is_some_and(|settings| settings.contains(&format!("\"{number}\":")))
    );
}

#[test]
fn malformed_cases_name_the_case_and_the_field() {
    assert_eq!(parse("", &table()), Err(CasesError::Empty));
    for (case, parts) in [
        ("expect = { rwo = 1 }", ["case \"c\": expect", "unknown variant `rwo`", "did you mean `row`?"]),
        ("expect = { plan = \"lokal\" }", ["case \"c\": expect", "`lokal`", "did you mean `local`?"]),
        (
            "row = []\nexpect = \"abstain\"",
            ["case \"c\": row", "unknown field `row`", "did you mean `rows`?"],
        ),
        ("", ["case \"c\": fields", "missing field `expect`", ""]),
        (
            "outcomes = [{}, { leg = \"prefil\" }]\nexpect = \"abstain\"",
            ["case \"c\": outcomes[1].leg", "unknown variant `prefil`", "did you mean `prefill`?"],
        ),
        ("seed = \"x\"\nexpect = \"abstain\"", ["case \"c\": seed", "invalid type", ""]),
    ] {
        let message = problem(case);
        assert!(parts.iter().all(|part| message.contains(part)), "{case}: {message}");
    }
    let unnamed =
        parse("[[case]]\nname = \"a\"\nexpect = \"abstain\"\n[[case]]\nexpect = \"abstain\"", &table());
    let message = unnamed.expect_err("no name").to_string();
    assert!(message.starts_with("case \"2\": fields: missing field `name`"), "{message}");
    let document = parse("[[cases]]\nname = \"a\"", &table()).expect_err("no such key").to_string();
    assert!(document.contains("unknown field `cases`, expected `case`"), "{document}");
}
