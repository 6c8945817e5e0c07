use super::*;
use crate::{Inputs, texts, try_out, vocabulary::FUNCTIONS};

const TABLE: [(&str, &str, &str); 14] = [
    ("request", "prompt-tokens", "u32"),
    ("request", "request-blocks", "u32"),
    ("request", "tenant-hash", "u64"),
    ("request", "max-tokens", "u32"),
    ("request", "priority", "f32"),
    ("request", "other-leg-worker-id", "u64"),
    ("worker", "worker-id", "u64"),
    ("worker", "engine-queue", "u32"),
    ("worker", "engine-queue-known", "u32"),
    ("worker", "kv-usage", "f32"),
    ("worker", "kv-usage-known", "u32"),
    ("worker", "cached-blocks-device", "u32"),
    ("worker", "lora-loaded", "u32"),
    ("worker", "load-age-ms", "u32"),
];

fn vocabulary() -> Vocabulary {
    Vocabulary::new(TABLE)
}

fn names() -> Names {
    [("batch".to_owned(), 7), ("gold".to_owned(), 1 << 40)].into()
}

fn compiled(source: &str, role: Role) -> (Formula, Asked) {
    let mut asked = Asked::default();
    let formula = Formula::new(source, role, &vocabulary(), &names(), &mut asked).unwrap();
    (formula, asked)
}

fn mistake(source: &str, role: Role) -> String {
    let found = Formula::new(source, role, &vocabulary(), &names(), &mut Asked::default());
    found.unwrap_err().describe(source)
}

/// Evaluates a cost. The facts are in the order in which the formula asks for them.
fn costs(source: &str, request: &[u32], columns: &[u32], rows: usize) -> Vec<f32> {
    compiled(source, Role::Cost).0.numbers(Inputs { request, columns, rows })
}

#[test]
fn the_formulas_of_the_guide_ask_for_their_facts_and_give_their_costs() {
    let cost = "2 * ratio(engine_queue, max(engine_queue)) + \
                ratio(request_blocks - cached_blocks_device, request_blocks)";
    let (formula, asked) = compiled(cost, Role::Cost);
    assert_eq!(asked.names(), [vec!["request-blocks"], vec!["engine-queue", "cached-blocks-device"]]);
    let inputs = Inputs { request: &[10], columns: &[0, 4, 2, 0, 10, 5], rows: 3 };
    assert_eq!(formula.numbers(inputs), [1.0, 2.0, 1.5]);
    assert_eq!(formula.numbers(Inputs { request: &[0], columns: &[0; 6], rows: 3 }), [0.0; 3]);
    let keep = "(!known(kv_usage) || kv_usage < 0.95) && (tenant != 'batch' || taint('spot'))";
    let (formula, asked) = compiled(keep, Role::Keep);
    assert_eq!(asked.names(), [vec!["tenant-hash"], vec!["kv-usage-known", "kv-usage", "taint-is/spot"]]);
    let full = 0.99_f32.to_bits();
    let columns = [1, 0, 1, full, full, 0, 1, 0, 0];
    assert_eq!(formula.rows(Inputs { request: &[8, 0], columns: &columns, rows: 3 }), [1, 2]);
    let columns = [0, 0, 1, 0, 0, 0, 1, 0, 0];
    assert_eq!(formula.rows(Inputs { request: &[7, 0], columns: &columns, rows: 3 }), [0]);
    let (formula, _) = compiled("min(engine_queue) > 40", Role::Shed);
    assert!(formula.holds(Inputs { request: &[], columns: &[41, 99], rows: 2 }));
    assert!(!formula.holds(Inputs { request: &[], columns: &[41, 40], rows: 2 }));
}

#[test]
fn every_function_and_operator_has_its_value() {
    let of = |source: &str| costs(source, &[6], &[1, 2, 9], 3);
    assert_eq!(of("prompt_tokens + engine_queue"), [7.0, 8.0, 15.0]);
    assert_eq!(
        of("min(engine_queue) + max(engine_queue) * mean(engine_queue) - sum(engine_queue)"),
        [25.0; 3]
    );
    assert_eq!(of("engine_queue < 2 ? -1 : engine_queue"), [-1.0, 2.0, 9.0]);
    assert_eq!(of("if(engine_queue >= 2, 10 / engine_queue, true)"), [1.0, 5.0, 10.0 / 9.0]);
    assert_eq!(of("clamp(engine_queue, 2, 5)"), [2.0, 2.0, 5.0]);
    assert_eq!(of("min(engine_queue, 2) + max(5, engine_queue)"), [6.0, 7.0, 11.0]);
    assert_eq!(of("log(exp(engine_queue)) * 0 + engine_queue / 0"), [f32::MAX; 3]);
    assert_eq!(of("ratio(engine_queue, 0) + (engine_queue in [1, 9] ? 1 : 0)"), [1.0, 0.0, 1.0]);
    assert_eq!(of("sum(1) + mean(2) + min(engine_queue > 1)"), [5.0; 3]);
    assert_eq!(of("!(engine_queue != 2 && engine_queue <= 9) || false"), [0.0, 1.0, 0.0]);
}

#[test]
fn ids_are_compared_exactly_and_names_by_their_hash() {
    let high = |source: &str, request: &[u32], columns: &[u32]| {
        compiled(source, Role::Keep).0.rows(Inputs { request, columns, rows: 2 })
    };
    assert_eq!(high("tenant == 'gold'", &[0, 256], &[]), [0, 1]);
    assert_eq!(high("tenant in ['batch', 'gold']", &[7, 0], &[]), [0, 1]);
    assert_eq!(high("tenant_hash == 'batch'", &[7, 1], &[]), [] as [u32; 0]);
    assert_eq!(high("worker_id == 8589934593", &[], &[1, 1, 2, 0]), [0]);
    assert_eq!(high("worker_id != other_leg_worker_id", &[1, 0], &[1, 1, 2, 0]), [0]);
    assert_eq!(high("known(tenant)", &[0, 0], &[]), [] as [u32; 0]);
    assert_eq!(high("known(load_age_ms) && known(prompt_tokens)", &[], &[u32::MAX, 5]), [1]);
    assert_eq!(
        high("label('zone') == 'a' && label_number('cost') < 2", &[], &[1, 1, 0, 2_f32.to_bits()]),
        [0]
    );
    assert_eq!(texts("tenant == 'batch' || tenant in ['gold', 'batch']"), ["batch", "gold"]);
}

#[test]
fn a_mistake_names_its_column_and_a_suggestion() {
    let cases = [
        ("2 * engine_que", Role::Cost, "column 5: unknown name `engine_que`; did you mean `engine_queue`?"),
        ("engine-queue", Role::Cost, "column 1: unknown name `engine`; write `engine_queue`"),
        ("1 +\n xyzzy", Role::Cost, "line 2, column 2: unknown name `xyzzy`; see wit/facts.md"),
        ("maximum(engine_queue)", Role::Cost, "column 1: unknown function `maximum`; "),
        ("rato(1, 2)", Role::Cost, "column 1: unknown function `rato`; did you mean `ratio`?"),
        ("ratio(1)", Role::Cost, "column 1: wrong arguments of `ratio`; write ratio(a, b)"),
        ("kv_usage(1)", Role::Cost, "`kv_usage` is a fact and not a function; remove the parentheses"),
        ("1 + tenant", Role::Cost, "column 5: `tenant` is an id; compare it with `==`"),
        ("tenant == 1.5", Role::Keep, "column 11: expected a text in quotes or a whole number"),
        ("tenant == 'silver'", Role::Keep, "column 11: the hash of 'silver' is missing"),
        ("'a'", Role::Cost, "column 1: the text 'a' is not a value"),
        ("engine_queue", Role::Keep, "column 1: expected a condition, found a number"),
        ("engine_queue && true", Role::Keep, "column 1: expected a condition, found a number"),
        ("1 < engine_queue < 8", Role::Keep, "column 3: this compares a condition; join two"),
        ("engine_queue > 4", Role::Shed, "column 14: each candidate has its own value"),
        ("known(1)", Role::Keep, "column 7: expected the name of a fact"),
        ("label('zone')", Role::Keep, "column 1: a label is a text; compare it"),
        ("engine_queue in []", Role::Keep, "the list is empty"),
    ];
    for (source, role, part) in cases {
        let text = mistake(source, role);
        assert!(text.contains(part), "{source}: {text}");
    }
}

#[test]
fn operations_and_operations_times_candidates_are_bounded() {
    let exps = format!("{}1", "exp(prompt_tokens)+".repeat(40));
    assert!(mistake(&exps, Role::Cost).contains("the formula has more than 256 operations"));
    // Each `in` of a chain doubles the operations, and all of them together nest.
    let chain = |length: usize| format!("1{}", " in [1,1]".repeat(length));
    assert!(mistake(&chain(20), Role::Cost).contains("the formula has more than 256 operations"));
    assert!(mistake(&chain(40), Role::Cost).contains("nested deeper than 32 levels"));
    assert!(mistake(&format!("1{}", "in[1]".repeat(800)), Role::Cost).contains("nested deeper"));
    let (formula, _) = compiled(&format!("{}1", "engine_queue+".repeat(100)), Role::Cost);
    assert_eq!(formula.work(), 200);
    assert_eq!(formula.check_work(2_621), Ok(()));
    assert!(formula.check_work(2_622).unwrap_err().contains("more than 524288"));
}

#[test]
fn a_formula_that_rejects_every_request_of_an_idle_fleet_is_refused() {
    let tried = |source: &str, role| {
        let (formula, asked) = compiled(source, role);
        try_out(&[&formula], &asked)
    };
    assert!(
        tried("min(engine_queue) < 40", Role::Shed)
            .unwrap_err()
            .contains("shed.when: it holds for an idle fleet")
    );
    assert!(
        tried("kv_usage > 0.5", Role::Keep)
            .unwrap_err()
            .contains("keep: it keeps no worker of an idle fleet")
    );
    for (source, role) in [
        ("min(engine_queue) > 40", Role::Shed),
        ("tenant != 'gold'", Role::Shed),
        ("kv_usage < 0.95 && known(engine_queue)", Role::Keep),
        ("label('zone') == 'a'", Role::Keep),
        ("load_age_ms > 100000", Role::Keep),
        ("exp(exp(priority)) / log(kv_usage) - ratio(engine_queue, max_tokens) * -3e38", Role::Cost),
    ] {
        assert_eq!(tried(source, role), Ok(()), "{source}");
    }
}

#[test]
fn random_formulas_over_random_facts_give_one_finite_cost_for_each_candidate() {
    // A linear congruential generator: the same formulas in every run.
    let mut state = 1_u64;
    let mut draw = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % below
    };
    fn write(draw: &mut impl FnMut(usize) -> usize, depth: usize) -> String {
        const LEAVES: [&str; 8] =
            ["0", "3e38", "engine_queue", "kv_usage", "prompt_tokens", "priority", "lora_loaded", "1e-40"];
        if depth == 0 {
            return LEAVES[draw(LEAVES.len())].to_owned();
        }
        let mut inner = || write(draw, depth - 1);
        let (a, b) = (inner(), inner());
        match draw(9) {
            0 => format!("({a} + {b})"),
            1 => format!("({a} - {b})"),
            2 => format!("({a} * {b})"),
            3 => format!("({a} / {b})"),
            4 => format!("ratio({a}, {b})"),
            5 => format!("max({a})"),
            6 => format!("exp({a})"),
            7 => format!("log({b})"),
            _ => format!("if({a} != {b}, sum({a}), -{b})"),
        }
    }
    let mut evaluated = 0;
    for round in 0..2_000 {
        let source = write(&mut draw, round % 5);
        let mut asked = Asked::default();
        let Ok(formula) = Formula::new(&source, Role::Cost, &vocabulary(), &names(), &mut asked) else {
            continue;
        };
        assert_eq!(try_out(&[&formula], &asked), Ok(()), "{source}");
        let rows = draw(70) + 1;
        let mut words =
            |count: usize| (0..count).map(|_| u32::try_from(draw(1 << 32)).unwrap()).collect::<Vec<_>>();
        let (request, columns) = (words(8), words(8 * rows));
        let costs = formula.numbers(Inputs { request: &request, columns: &columns, rows });
        assert_eq!(costs.len(), rows);
        assert!(costs.iter().all(|cost| cost.is_finite()), "{source}: {costs:?}");
        evaluated += 1;
    }
    assert!(evaluated > 1_500, "{evaluated}");
}

#[test]
fn the_lists_of_facts_are_those_of_the_reference() {
    use crate::vocabulary::{ABSENT, FLAGS, WITH_KNOWN};
    let (mut flags, mut absent, mut with_known) = (Vec::new(), Vec::new(), Vec::new());
    for line in include_str!("../../../../wit/facts.md").lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, name, ty, _, unit, missing, _] = cells.as_slice() else { continue };
        let Some(name) = name.strip_prefix('`').and_then(|name| name.strip_suffix('`')) else { continue };
        if name.contains('/') || !["u32", "u64", "f32"].contains(ty) {
            continue;
        }
        if unit.contains("1 yes, 0 no") {
            flags.push(name);
        }
        match missing.split(|letter: char| !letter.is_ascii_digit()).next().unwrap_or_default() {
            "" => {}
            _ if missing.contains("-known") => with_known.push(name),
            value => absent.push((name, value.parse::<u32>().unwrap())),
        }
    }
    let sorted = |mut list: Vec<&'static str>| {
        list.sort_unstable();
        list
    };
    let mut listed = ABSENT.to_vec();
    listed.sort_unstable();
    absent.sort_unstable();
    assert_eq!(absent, listed);
    assert_eq!(
        sorted(with_known),
        sorted(WITH_KNOWN.to_vec()).iter().map(|name| &**name).collect::<Vec<_>>()
    );
    assert_eq!(sorted(flags), sorted(FLAGS.to_vec()));
    assert_eq!(FUNCTIONS.len(), 13);
}
