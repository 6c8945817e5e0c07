//! Fields without effect.

use super::*;

#[test]
fn o10_8_fields_that_the_simulation_drops_are_named_once() {
    let with = |fields: &str| format!("{}, {fields}}}\n", LINE.strip_suffix('}').unwrap());
    let notes = |text: &str| parse(text, false).unwrap().notes;
    let set = with(r#""lora_id": 3, "Images": ["a"]"#);
    let note =
        "fields of the trace without effect: `Images`, `lora_id`; the simulation has no adapters, images, ";
    let found = notes(&format!("{LINE}\n{set}{set}"));
    assert!(found.len() == 1 && found[0].starts_with(note), "{found:?}");
    let unset = with(r#""lora_id": null, "images": [], "adapter": "", "has_audio": false, "num_images": 0"#);
    assert!(notes(&unset).is_empty() && notes(&with(r#""model": "image-lora""#)).is_empty());
    let azure = |images: &str| {
        format!("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-05-10T00:00:01Z,{images},5,5\n")
    };
    assert!(notes(&azure("2"))[0].starts_with("fields of the trace without effect: `NumImages`;"));
    assert!(notes(&azure("0")).is_empty() && notes(&azure("")).is_empty());
}
