#![allow(clippy::unwrap_used, reason = "tests may fail")]

use super::*;

fn open(dir: &Path, replace: bool) -> anyhow::Result<LaneFiles> {
    LaneFiles::open(dir, "prefill", None, false, replace)
}

fn names(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn a_shadow_becomes_canary_and_shadow_again_and_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let mut files = open(dir.path(), false).unwrap();
    assert!(files.make_canary().is_err() && files.make_shadow().is_err() && files.undo_promotion().is_err());
    files.place(b"one").unwrap();
    assert_eq!(names(dir.path()), ["prefill.shadow.wasm"]);
    files.make_canary().unwrap();
    assert_eq!(names(dir.path()), ["prefill.canary.wasm"]);
    files.make_shadow().unwrap();
    files.make_canary().unwrap();
    files.place(b"two").unwrap();
    files.make_shadow().unwrap();
    assert_eq!(names(dir.path()), ["prefill.shadow.wasm"], "the newer shadow stays");
    assert_eq!(fs::read(files.path(Lane::Shadow)).unwrap(), b"two");
    assert_eq!(files.remove(), [format!("removed {}", files.path(Lane::Shadow).display())]);
    assert!(names(dir.path()).is_empty() && files.remove().is_empty());
}

#[test]
fn files_of_others_are_neither_replaced_nor_removed() {
    let dir = tempfile::tempdir().unwrap();
    let shadow = dir.path().join("prefill.shadow.wasm");
    fs::write(&shadow, "theirs").unwrap();
    let error = open(dir.path(), false).err().unwrap().to_string();
    assert!(error.contains("prefill.shadow.wasm exists: remove it"), "{error}");
    let mut files = open(dir.path(), true).unwrap();
    files.place(b"ours").unwrap();
    fs::write(&shadow, "theirs again").unwrap();
    assert!(files.make_canary().is_err());
    let said = files.remove();
    assert!(
        said.len() == 1 && said.concat().ends_with("was replaced by another program, and stays"),
        "{said:?}"
    );
    fs::remove_file(&shadow).unwrap();
    files.place(b"ours").unwrap();
    fs::write(dir.path().join("prefill.canary.formula.toml"), "theirs").unwrap();
    assert!(files.make_canary().unwrap_err().to_string().contains("this command did not write it"));
    fs::rename(shadow, dir.path().join("prefill.shadow.formula.toml")).unwrap();
    assert!(open(dir.path(), true).is_err(), "the gateway refuses two files of a lane");
    assert!(LaneFiles::open(&dir.path().join("absent"), "prefill", None, false, false).is_err());
    assert!(LaneFiles::open(dir.path(), "decode", Some("../up"), false, false).is_err());
    LaneFiles::open(dir.path(), "decode", Some("org/name"), false, false).unwrap();
}

#[test]
fn a_promotion_replaces_the_active_file_and_can_be_taken_back() {
    for (before, ending) in
        [(None, ""), (Some("prefill.wasm"), ".wasm"), (Some("prefill.formula.toml"), FORMULA_SUFFIX)]
    {
        let dir = tempfile::tempdir().unwrap();
        if let Some(before) = before {
            fs::write(dir.path().join(before), "before").unwrap();
        }
        let mut files = open(dir.path(), false).unwrap();
        files.place(b"ours").unwrap();
        files.promote(Lane::Shadow).unwrap();
        let copy = format!(".prefill.before-dev{ending}");
        let expected: Vec<&str> = before.map(|_| copy.as_str()).into_iter().chain(["prefill.wasm"]).collect();
        assert_eq!(names(dir.path()), expected);
        assert_eq!(fs::read(dir.path().join("prefill.wasm")).unwrap(), b"ours");
        assert!(files.promoted().is_some() && files.remove().is_empty(), "what was promoted stays");
        assert_eq!(files.copies().count(), usize::from(before.is_some()));
        files.undo_promotion().unwrap();
        assert_eq!(names(dir.path()), before.into_iter().collect::<Vec<_>>());
        assert!(before.is_none_or(|before| fs::read(dir.path().join(before)).unwrap() == b"before"));
    }
}
