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
