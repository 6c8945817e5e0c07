use super::*;

fn problem(text: &str) -> String {
    parse(text).unwrap_err()
}

#[test]
fn values_have_their_lines() {
    let text = "a: 1\nb:\n  - x\n  - { c: \"2\" }\nd: |\n  first\n  second\n";
    let root = parse(text).unwrap().remove(0);
    assert_eq!(root.get("a").unwrap().text(), Some("1"));
    let list = root.get("b").unwrap().list();
    assert_eq!((list[0].line, list[1].line), (3, 4));
    assert_eq!(list[1].get("c").unwrap().text(), Some("2"));
    let block = root.get("d").unwrap();
    assert_eq!((block.text(), block.line), (Some("first\nsecond\n"), 6));
    assert_eq!(root.entries()[2].0.line, 5);
}

#[test]
fn json_is_read_and_aliases_are_copies() {
    let root = parse("{\"a\": [true, null], \"b\": {\"c\": 1.5}}").unwrap().remove(0);
    assert!(root.get("a").unwrap().list()[1].is_null());
    let root = parse("a: &x { k: v }\nb: *x\n").unwrap().remove(0);
    assert_eq!(root.get("b").unwrap().get("k").unwrap().text(), Some("v"));
    assert_eq!(parse("a: 1\n---\nb: 2\n").unwrap().len(), 2);
    assert!(parse("").unwrap().is_empty());
}

#[test]
fn s1_a_bomb_ends_with_an_error_that_names_the_bound() {
    let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..9 {
        let alias = format!("*a{}", level - 1);
        let list = [alias.as_str(); 10].join(", ");
        bomb.push_str(&format!("a{level}: &a{level} [{list}]\n"));
    }
    // S1.6
    assert!(problem(&bomb).contains("more than 50000 values"), "{}", problem(&bomb));
    let mut long = format!("a: &a {}\nb:\n", "x".repeat(100_000));
    long.push_str(&"  - *a\n".repeat(1_000));
    // S1.6
    assert!(problem(&long).contains("bytes of texts"));
    let anchors: String = (0..60_000).map(|number| format!("- &a{number} x\n")).collect();
    // S1.6
    assert!(problem(&anchors).contains("more than 50000 values"));
    for deep in
        ["[".repeat(200), "[".repeat(500_000), "- ".repeat(5_000), "{a: ".repeat(3_000), "? ".repeat(9_000)]
    {
        // S1.6
        assert!(!problem(&deep).is_empty());
    }
    let nested: String = (0..80).map(|depth| format!("{}a:\n", "  ".repeat(depth))).collect();
    // S1.6
    assert!(problem(&nested).contains("more than 64 levels"));
    // S1.6
    assert!(problem(&"---\na\n".repeat(101)).contains("more than 100 documents"));
}

#[test]
fn s1_what_is_ambiguous_is_refused_with_its_line() {
    for (text, part) in [
        ("a: 1\na: 2\n", "line 2: the key `a` appears twice"),
        ("a: &x [*x]\n", "an alias within what it stands for"),
        ("a: *x\n", "line 1: "),
        ("a:\n  <<: { b: 1 }\n", "line 2: merge keys"),
        ("? [a]\n: b\n", "is not a plain text"),
        ("a: [1\nb: 2\n", "line 2"),
        ("a: \"\\q\"\n", "line 1"),
        ("&x a: 1\n", "is not a plain text"),
    ] {
        let problem = problem(text);
        // S1.6
        assert!(problem.contains(part), "{text:?}: {problem}");
    }
}
