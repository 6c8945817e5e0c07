//! The reader of cases: every kind of expectation, every type of fact, and what is told when it is wrong.

use super::*;

fn one(case: &str) -> Result<Case, CasesError> {
    let text = format!("[[case]]\nname = \"c\"\n{case}\n");
    parse(&text).map(|cases| cases.into_iter().next().expect("one case"))
}

fn problem(case: &str) -> String {
    one(case).expect_err("wrong").to_string()
}

#[test]
fn every_kind_of_expectation_is_read_and_told() {
    let table = [
        ("{ row = 2 }", Expect::Row(2), "row 2"),
        ("\"abstain\"", Expect::Abstain, "abstain"),
        ("{ costs = [1, 2.5] }", Expect::Costs(vec![1.0, 2.5]), "costs [1.0, 2.5]"),
        ("{ keep = [0, 3] }", Expect::Keep(vec![0, 3]), "keep [0, 3]"),
        ("{ plan = \"remote\" }", Expect::Plan(ExpectedPlan::Remote), "plan remote"),
        ("{ plan = \"local\" }", Expect::Plan(ExpectedPlan::Local), "plan local"),
        ("{ refused = \"no\" }", Expect::Refused("no".to_owned()), "refused with `no`"),
    ];
    for (text, expected, told) in table {
        let case = one(&format!("expect = {text}")).expect(text);
        assert_eq!(case.expect, expected);
        assert_eq!(case.expect.to_string(), told);
    }
}

#[test]
fn words_lie_in_the_order_that_was_asked_for() {
    let case = one(
        "seed = 9\nsettings = { a = 1.0, b = [true] }\nrequest = { priority = 2, session-hash = 4294967298 }\n\
         rows = [{ dp-rank = 1, kv-usage = 0.5, \"label-is/zone=a\" = 1 }, { worker-id = 8589934595 }]\n\
         decode = { \"label-number/cost\" = 1.5 }\nexpect = { row = 0 }",
    );
    let case = case.expect("sound");
    let wants = Wants::resolve(
        &["session-hash", "n", "priority"],
        &["worker-id", "kv-usage", "dp-rank", "label-is/zone=a", "label-number/cost"],
    );
    let wants = wants.expect("known");
    assert_eq!(request_words(&wants, &case.request), [2, 1, 0, 2.0_f32.to_bits()]);
    let half = 0.5_f32.to_bits();
    assert_eq!(worker_words(&wants, &case.rows), [0, 3, 0, 2, half, 0, 1, 0, 1, 0, 0, 0]);
    let decode = worker_words(&wants, std::slice::from_ref(&case.decode));
    assert_eq!(decode, [0, 0, 0, 0, 0, 1.5_f32.to_bits()]);
    assert_eq!((case.seed, case.settings.as_deref()), (9, Some(r#"{"a":1.0,"b":[true]}"#)));
}

#[test]
fn whole_numbers_are_exact_to_the_last_bit() {
    let case = one(
        "request = { session-hash = 9007199254740993, tenant-hash = 9223372036854775807, block-size = 4294967295, n = 2.0 }\nexpect = \"abstain\"",
    );
    let wants = Wants::resolve(&["session-hash", "tenant-hash", "block-size", "n"], &[] as &[&str]);
    let words = request_words(&wants.expect("known"), &case.expect("sound").request);
    assert_eq!(words, [1, 0x0020_0000, 0xffff_ffff, 0x7fff_ffff, 0xffff_ffff, 2]);
}

#[test]
fn a_fact_that_does_not_exist_is_named() {
    let table = [
        ("request = { prompt-text = 1 }", "case `c`: request: unknown request fact `prompt-text`"),
        ("request = { dp-rank = 1 }", "case `c`: request: unknown request fact `dp-rank`"),
        ("rows = [{}, { activ-requests = 1 }]", "case `c`: row 1: unknown worker fact `activ-requests`"),
        ("decode = { block-size = 1 }", "case `c`: decode: unknown worker fact `block-size`"),
        ("rows = [{ \"label-is/zone\" = 1 }]", "case `c`: row 0: unknown worker fact `label-is/zone`"),
    ];
    for (case, told) in table {
        assert_eq!(problem(&format!("{case}\nexpect = \"abstain\"")), told);
    }
}

#[test]
fn a_value_that_does_not_fit_its_fact_is_told() {
    let table = [
        ("n = -1", "case `c`: request: `n`: -1 is not a whole number below 2^32"),
        ("n = 1.5", "case `c`: request: `n`: 1.5 is not a whole number below 2^32"),
        ("n = 4294967296", "case `c`: request: `n`: 4294967296 is not a whole number below 2^32"),
        ("lora-hash = -7", "case `c`: request: `lora-hash`: -7 is not a whole number below 2^64"),
    ];
    for (value, told) in table {
        assert_eq!(problem(&format!("request = {{ {value} }}\nexpect = \"abstain\"")), told);
    }
    assert!(problem("request = { n = \"many\" }\nexpect = \"abstain\"").contains("a number"));
}

#[test]
fn what_is_no_case_is_told() {
    assert_eq!(parse(""), Err(CasesError::Empty));
    assert!(problem("expect = { rwo = 1 }").contains("unknown variant `rwo`"));
    assert!(problem("expect = { plan = \"elsewhere\" }").contains("unknown variant `elsewhere`"));
    assert!(problem("row = []\nexpect = \"abstain\"").contains("unknown field `row`"));
    assert!(problem("").contains("missing field `expect`"));
}
