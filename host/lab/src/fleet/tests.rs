use super::*;

#[test]
fn a_fleet_file_names_its_groups() {
    let text = "block_tokens = 16\n[[engines]]\nrole = \"prefill\"\ncount = 2\n[[engines]]\nrole = \"decode\"\n\
                count = 3\nblocks = 100\nstep_time = { linear = { c0 = 1, c1 = 0, c2 = 0, c3 = 0.1, c4 = 0 } }\n";
    let fleet: Fleet = toml::from_str(text).unwrap();
    fleet.check().unwrap();
    let blocks: Vec<u32> = fleet.engines.iter().map(|group| group.kv_blocks(16)).collect();
    assert_eq!(blocks, [65_536, 100]);
}

#[test]
fn a_value_out_of_range_is_named_with_its_place() {
    let group = EngineGroup::new(Role::Aggregated, 1);
    let of = |group: EngineGroup| Fleet { engines: vec![group], ..Fleet::default() };
    let zero = StepTimeSpec::Linear { c0: 0.0, c1: 0.0, c2: 0.0, c3: 0.0, c4: 0.0 };
    let table = [
        (Fleet::default(), "add aggregated engines"),
        (of(EngineGroup { count: 0, ..group.clone() }), "engines[0].count: 0"),
        (of(EngineGroup { role: Role::Prefill, ..group.clone() }), "1 prefill, 0 decode"),
        (of(EngineGroup { step_time: zero, ..group.clone() }), "engines[0].step_time"),
        (
            of(EngineGroup { request_overhead_ms: -1.0, ..group.clone() }),
            "engines[0].request_overhead_ms: -1",
        ),
        (Fleet { kv_event_delay_ms: f64::NAN, ..of(group.clone()) }, "kv_event_delay_ms: NaN"),
        (of(EngineGroup { count: 70_000, ..group }), "more than 65536"),
    ];
    for (fleet, message) in table {
        let error = fleet.check().unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn a_file_s_problems_are_reported_together_with_lines_and_suggestions() {
    let text = "block_tokens = 0\nscrape_intervl_ms = 5\n[[engines]]\nrole = \"prefil\"\ncount = 2\n\
                [[engines]]\ncount = 0\nstep_time = \"distserve-opt-13b\"\nblocks = \"many\"\n";
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let error = Fleet::read(file.path()).unwrap_err().to_string();
    let found: Vec<&str> =
        error.lines().map(|line| line.split_once(':').map_or(line, |(_, rest)| rest)).collect();
    let expected = [
        "1:1: block_tokens: 0 is not within 1 to 65536",
        "2:1: scrape_intervl_ms: unknown key `scrape_intervl_ms`: did you mean `scrape_interval_ms`?",
        "4:1: engines[0].role: unknown value `prefil`: did you mean `prefill`?",
        "7:1: engines[1].count: 0 is not within 1 to 16777216",
        "8:1: engines[1].step_time: unknown value `distserve-opt-13b`: did you mean `distserve-opt-13b-a100`?",
        "9:1: engines[1].blocks: invalid type: string \"many\", expected a whole number of 0 or more",
    ];
    assert_eq!(found, expected);
}

#[test]
fn every_preset_has_its_name_in_a_fleet_file() {
    for name in StepTimeSpec::NAMES {
        let text = format!("[[engines]]\ncount = 1\nstep_time = \"{name}\"\n");
        let fleet: Fleet = toml::from_str(&text).unwrap();
        let spec = fleet.engines.first().unwrap().step_time;
        assert_eq!((spec.name(), Some(spec)), (name, StepTimeSpec::by_name(name)));
    }
}

#[test]
fn a_transfer_takes_its_bytes_and_the_latency() {
    let links =
        Links { bytes_per_token: 1_000_000, gigabytes_per_second: 1.0, latency_ms: 2.0, ..Links::default() };
    assert_eq!(links.transfer(10), Duration::from_millis(12));
}

#[test]
fn o8_5_an_engine_without_a_number_of_blocks_has_as_many_tokens_in_blocks_of_any_size() {
    for (block_tokens, blocks) in [(16, 65_536), (64, 16_384), (512, 2_048), (65_536, 16)] {
        let text = format!(
            "block_tokens = {block_tokens}\n[[engines]]\ncount = 3\n[[engines]]\ncount = 1\nblocks = 7\n"
        );
        let fleet: Fleet = toml::from_str(&text).unwrap();
        fleet.check().unwrap();
        let limits = fleet.engines[0].limits(block_tokens);
        // O8.5
        assert_eq!((limits.blocks, limits.block_size), (blocks, block_tokens));
        let note = format!(
            "`blocks` is not given for 3 engines of the fleet: {blocks} blocks of {block_tokens} tokens, which hold \
             1048576 tokens of KV, are assumed for each"
        );
        // O8.5
        assert_eq!(fleet.assumption(), Some(note));
    }
    let given: Fleet = toml::from_str("[[engines]]\ncount = 1\nblocks = 7\n").unwrap();
    assert_eq!(given.assumption(), None);
}
