//! Small files that are expensive to read, and generated files.

use std::time::Duration;

use arbitrary::Unstructured;
use pointsman_test_bombs as bombs;
use rand::{Rng as _, RngExt as _, SeedableRng as _, rngs::SmallRng};

use super::cases::{Case, Content, Expected, Guests, PREFILL, case};

/// Number of bytes from which a module is generated. More bytes give larger modules.
const SEED_BYTES: usize = 8_192;

/// Returns files that overload the parser, the compiler or the instance pool.
pub(super) fn cases(guests: &Guests) -> Vec<Case> {
    let [good, _] = &guests.good;
    let with = |module: &[u8]| bombs::with_module(good, module);
    let table: Vec<(&str, Vec<u8>, &str)> = vec![
        ("2,000 nested instance types", bombs::nested_instance_types(2_000), "exceeds_limit"),
        ("a chain of 30,000 list types", bombs::nested_lists(30_000), "exceeds_limit"),
        ("a section that claims 4 GiB", bombs::claims_4_gib(), "malformed"),
        ("a section that claims 2^32 types", bombs::claims_many_types(), "malformed"),
        ("2^130 instances", bombs::with_component(good, &bombs::doubling_instances(130)), "exceeds_limit"),
        (
            "20,000 nested components",
            bombs::with_component(good, &bombs::nested_components(20_000)),
            "exceeds_limit",
        ),
        ("40,000 locals in 7 MiB", with(&bombs::many_locals(40_000, 7 << 20)), "exceeds_limit"),
        ("4,000 locals in 260 KiB", with(&bombs::many_locals(4_000, 260 << 10)), "exceeds_limit"),
        ("100,000 nested loops", with(&bombs::nested_loops(100_000)), "exceeds_limit"),
        ("100,000 nested blocks", with(&bombs::nested_blocks(100_000)), "exceeds_limit"),
        ("a function of 4 MB", with(&bombs::large_function(4_000_000)), "compiler_died"),
        ("60 memories of 16 MiB", bombs::with_instances(good, &bombs::memories(60, 256), 1), "exceeds_limit"),
        ("245 memories of 64 KiB", bombs::with_instances(good, &bombs::memories(1, 1), 245), "exceeds_limit"),
        ("2 memories of 16 MiB", bombs::with_instances(good, &bombs::memories(1, 256), 1), "exceeds_limit"),
        ("100 tables", bombs::with_instances(good, &bombs::many_tables(1, 1), 100), "exceeds_limit"),
        (
            "tables of 30,000 elements",
            bombs::with_instances(good, &bombs::many_tables(2, 15_000), 1),
            "exceeds_limit",
        ),
        ("600 instances", bombs::with_instances(good, &bombs::memories(0, 0), 600), "exceeds_limit"),
    ];
    let mut cases: Vec<Case> = table
        .into_iter()
        .map(|(name, bytes, kind)| case(name, PREFILL, bytes, Expected::Refused(kind.to_owned())))
        .collect();
    cases.push(Case {
        content: Content::Changing { times: 500, pause: Duration::from_millis(20) },
        ..case("changes 50 times a second in two slots", PREFILL, Vec::new(), Expected::Serves)
    });
    cases
}

/// Returns `count` generated files: modules, modules within a good policy, and good policies with a few
/// changed bytes.
pub(super) fn generated(guests: &Guests, seed: u64, count: u32) -> Vec<Case> {
    let [good, _] = &guests.good;
    let mut random = SmallRng::seed_from_u64(seed);
    let mut cases = Vec::new();
    for number in 0..count {
        let (kind, bytes) = match number % 3 {
            0 => ("module", module(&mut random)),
            1 => ("policy with module", bombs::with_module(good, &module(&mut random))),
            _ => ("mutant", mutant(good, &mut random)),
        };
        cases.push(case(&format!("generated {number}: {kind}"), PREFILL, bytes, Expected::Any));
    }
    cases
}

fn module(random: &mut SmallRng) -> Vec<u8> {
    let mut seed = vec![0; SEED_BYTES];
    random.fill_bytes(&mut seed);
    let module = wasm_smith::Module::new(wasm_smith::Config::default(), &mut Unstructured::new(&seed));
    // If no module can be generated, the file contains random bytes.
    module.map_or(seed, |module| module.to_bytes())
}

/// Returns a policy with up to eight changed bytes.
fn mutant(good: &[u8], random: &mut SmallRng) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for _ in 0..random.random_range(1..=8_u32) {
        let place = random.random_range(0..bytes.len());
        let byte = random.random::<u8>();
        bytes.iter_mut().skip(place).take(1).for_each(|to| *to = byte);
    }
    bytes
}
