//! Times in other forms, fields without effect, and lines that are cut off.

use super::*;

fn at_ms(times: &[&str]) -> Result<Vec<u128>, String> {
    let lines = times.iter().map(|time| LINE.replace("3000", time) + "\n").collect::<String>();
    let trace = parse(&lines, false).map_err(|error| error.to_string())?;
    Ok(requests(&trace).iter().map(|one| one.0).collect())
}

#[test]
fn o10_6_times_may_be_dates_and_numbers_may_be_in_quotes() {
    let dates =
        [r#""2023-04-09T00:02:53""#, r#""2023-04-09 00:02:54.5+00:00""#, r#""2023-04-09T02:02:55+02:00""#];
    // O10.6
    assert_eq!(at_ms(&dates).unwrap(), [0, 1_500, 2_000]);
    assert_eq!(at_ms(&[r#""0""#, r#"" 1500.0 ""#, "2000"]).unwrap(), [0, 1_500, 2_000]);
    let error = at_ms(&[r#""09/04/2023 00:02""#]).unwrap_err();
    let expected = "expected milliseconds as a number, or a date and time such as 2023-11-16T18:15:46.68Z";
    assert!(
        error.contains("`timestamp`: invalid value: string \"09/04/2023 00:02\", ")
            && error.contains(expected),
        "{error}"
    );
    let qwen = |time: &str| {
        format!(r#"{{"chat_id":1,"timestamp":{time},"input_length":16,"output_length":5,"hash_ids":[1]}}"#)
    };
    assert!(parse(&qwen(r#""2023-04-09T00:02:53""#), false).is_ok());
    let error = parse(&qwen("true"), false).unwrap_err().to_string();
    assert!(error.contains("expected seconds as a number, or a date"), "{error}");
    let burst =
        "Timestamp,Request tokens,Response tokens\n2023-04-09 00:02:53,10,7\n2023-04-09 00:02:54,20,7\n";
    assert_eq!(requests(&parse(burst, false).unwrap()), [(0, 10, 7), (1_000, 20, 7)]);
    // A file of texts says so also where its times are dates.
    let texts = r#"{"conversation_hash": "x", "timestamp": "2023-04-09T00:02:53", "messages": []}"#;
    let error = parse(texts, false).unwrap_err().to_string();
    assert!(error.contains("Its lines have texts (`messages`) and no lengths"), "{error}");
}

#[test]
fn o10_4_a_high_rate_from_a_date_on_is_no_doubt_about_the_unit() {
    let notes = |first: u64| {
        let lines = (0..20).map(|number| LINE.replace("3000", &(first + number).to_string()) + "\n");
        parse(&lines.collect::<String>(), false).unwrap().notes
    };
    assert!(notes(1_700_000_000_000).is_empty());
    // Seconds since the epoch, read as milliseconds.
    assert!(notes(1_700_000_000)[0].starts_with("1000 requests of the trace arrive in a second: "));
}

#[test]
fn o10_7_a_line_that_is_cut_off_is_called_so() {
    for length in [LINE.len() - 1, 30, 17, 5] {
        let error = parse(&format!("{LINE}\n{}", &LINE[..length]), false).unwrap_err().to_string();
        // O10.7
        assert!(error.starts_with("trace, line 2: the JSON object is cut off: EOF while parsing"), "{error}");
        assert!(error.ends_with("; --skip-bad leaves such lines out"), "{error}");
    }
}

#[test]
fn o10_8_fields_that_the_simulation_drops_are_named_once() {
    let with = |fields: &str| format!("{}, {fields}}}\n", LINE.strip_suffix('}').unwrap());
    let notes = |text: &str| parse(text, false).unwrap().notes;
    let set = with(r#""lora_id": 3, "Images": ["a"]"#);
    let note =
        "fields of the trace without effect: `Images`, `lora_id`; the simulation has no adapters, images, ";
    let found = notes(&format!("{LINE}\n{set}{set}"));
    // O10.8
    assert!(found.len() == 1 && found[0].starts_with(note), "{found:?}");
    let unset = with(r#""lora_id": null, "images": [], "adapter": "", "has_audio": false, "num_images": 0"#);
    assert!(notes(&unset).is_empty() && notes(&with(r#""model": "image-lora""#)).is_empty());
    let azure = |images: &str| {
        format!("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-05-10T00:00:01Z,{images},5,5\n")
    };
    assert!(notes(&azure("2"))[0].starts_with("fields of the trace without effect: `NumImages`;"));
    assert!(notes(&azure("0")).is_empty() && notes(&azure("")).is_empty());
}

#[test]
fn o10_12_fields_that_are_not_read_are_named_once() {
    let with = |fields: &str| format!("{}, {fields}}}\n", LINE.strip_suffix('}').unwrap());
    let notes = |text: &str| parse(text, false).unwrap().notes;
    let of = |names: &str, has: &str| format!("fields of the trace that are not read: {names}; {has}");
    let fields = mooncake::FIELDS.map(|field| format!("`{field}`")).join(", ");
    let note = |names: &str| of(names, &format!("its format has {fields}"));
    let first = with(r#""conversation_id": "a", "delay_ms": 5, "n": null, "model": "m""#);
    let text = format!("{first}{first}{}", with(r#""tenant": "x", "lora_id": 2"#));
    let found = notes(&text);
    // O10.12
    assert_eq!(found[1..], [note("`conversation_id`, `delay_ms`, `tenant`")], "{found:?}");
    let many: Vec<String> = (10..40).map(|number| format!("\"x{number}\": 1")).collect();
    let found = notes(&with(&many.join(", ")));
    let names: Vec<String> = (10..20).map(|number| format!("`x{number}`")).collect();
    assert_eq!(found, [note(&format!("{} and 20 more", names.join(", ")))]);
    let qwen = r#"{"chat_id":1,"timestamp":5,"input_length":16,"output_length":5,"type":"text","turn":1,"hash_ids":[1]}"#;
    assert!(notes(qwen).is_empty());
    let help = "`pointsman trace import --help` lists those of its format";
    let burst =
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type";
    assert!(notes(&format!("{burst}\n5,s,1,m,10,7,17,Chat\n")).is_empty());
    assert_eq!(notes(&format!("{burst},User\n5,s,1,m,10,7,17,Chat,u\n")), [of("`User`", help)]);
}

#[test]
fn o10_4_the_unit_is_doubted_in_formats_with_seconds_and_from_an_epoch_on_too() {
    let burst = |step: u64| {
        let rows = (0..20).map(|number| format!("{},10,7\n", 5 + number * step));
        let text = format!("Timestamp,Request tokens,Response tokens\n{}", rows.collect::<String>());
        parse(&text, false).unwrap().notes
    };
    // O10.4
    assert_eq!(
        burst(200),
        [
            "0.00500 requests of the trace arrive in a second: `timestamp` is in seconds in this format; if the file has \
          milliseconds, divide them by 1000"
        ]
    );
    assert!(burst(10).is_empty() && burst(0).is_empty());
    let qwen = (0..20).map(|number| {
        let at = number * 200;
        format!(
            r#"{{"chat_id":{number},"timestamp":{at},"input_length":16,"output_length":5,"hash_ids":[1]}}"#
        ) + "\n"
    });
    // O10.4
    assert!(parse(&qwen.collect::<String>(), false).unwrap().notes[0].starts_with("0.00500 requests"));
    let from = |first: u64, step: u64| {
        let lines = (0..20).map(|number| LINE.replace("3000", &(first + number * step).to_string()) + "\n");
        parse(&lines.collect::<String>(), false).unwrap().notes
    };
    // O10.4
    assert_eq!(
        from(1_700_000_000, 12),
        [
            "the trace begins at 1700000000: `timestamp` is in milliseconds in this format; if the file has seconds since \
          the Unix epoch, multiply them by 1000"
        ]
    );
    assert!(from(0, 2_000_000)[0].ends_with("if the file has microseconds, divide them by 1000"));
    assert!(from(5, 12).is_empty() && from(1_700_000_000_000, 2_000_000).is_empty());
    // O10.4
    assert!(from(0, 30_000).is_empty(), "a gateway at night");
    // Turns that wait for an answer count as load.
    let session = |number: u32| {
        let turn = format!(r#"{{"session_id":{number},"input_length":600,"output_length":5"#);
        let later = format!("{turn},\"delay\":5000}}\n").repeat(9);
        format!("{turn},\"timestamp\":{}}}\n{later}", number * 40_000)
    };
    let sessions = parse(&(0..20).map(session).collect::<String>(), false).unwrap().notes;
    assert!(!sessions.iter().any(|note| note.contains("arrive in a second")), "{sessions:?}");
}
