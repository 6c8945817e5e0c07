use super::*;

fn mistake(formula: &str) -> (usize, String) {
    let mistake = parse(formula).unwrap_err();
    (mistake.at, mistake.text)
}

/// Writes a tree with all its parentheses.
fn written(node: &Node) -> String {
    let all = |nodes: &[Node]| nodes.iter().map(written).collect::<Vec<_>>().join(", ");
    match &node.kind {
        NodeKind::Number(number, _) => number.to_string(),
        NodeKind::Flag(flag) => flag.to_string(),
        NodeKind::Text(text) => format!("{text:?}"),
        NodeKind::Name(name) => name.clone(),
        NodeKind::Call(name, nodes) => format!("{name}({})", all(nodes)),
        NodeKind::Not(node) => format!("!{}", written(node)),
        NodeKind::Negate(node) => format!("-{}", written(node)),
        NodeKind::Binary(operator, a, b) => format!("({} {operator:?} {})", written(a), written(b)),
        NodeKind::In(node, nodes) => format!("({} in [{}])", written(node), all(nodes)),
        NodeKind::If(nodes) => format!("if({})", all(&**nodes)),
    }
}

#[test]
fn operators_bind_as_in_cel() {
    let cases = [
        ("1+2*3-4/ 5", "((1 Add (2 Multiply 3)) Subtract (4 Divide 5))"),
        ("a - b - c", "((a Subtract b) Subtract c)"),
        ("a||b&&c==d", "(a Or (b And (c Equal d)))"),
        ("!a&&-b<=-2.5e1", "(!a And (-b LessOrEqual -25))"),
        ("!(a!=b)", "!(a NotEqual b)"),
        ("a?b:c?d:e", "if(a, b, if(c, d, e))"),
        ("a ? b ? 1 : 2 : 3", "if(a, if(b, 1, 2), 3)"),
        ("t in ['a', \"b\\\"\"] && x", "((t in [\"a\", \"b\\\"\"]) And x)"),
        (" min ( x , true )\n", "min(x, true)"),
        ("- -1", "--1"),
    ];
    for (formula, tree) in cases {
        assert_eq!(written(&parse(formula).unwrap()), tree, "{formula}");
    }
}

#[test]
fn a_mistake_has_its_place_and_what_was_expected() {
    let cases = [
        (
            "1 +",
            3,
            "expected a number, a fact, a function, a text or `(` after `+`; found the end of the formula",
        ),
        ("max(1, ", 7, "a text or `(` after `,`; found the end of the formula"),
        ("a = 1", 2, "found `=`; write `==` to compare"),
        ("a and b", 2, "found `and`; write `&&`"),
        ("a || ", 5, "after `||`; found the end"),
        ("(a", 2, "expected `(`, `)`, `?`, an operator; found the end"),
        ("max(a b)", 6, "found `b`"),
        ("engine_queue % 2", 13, "expected `(`, `?`, the end of the formula, an operator; found `%`"),
        ("'x", 2, "a quote that ends the text"),
        ("a ? b", 5, "`:`"),
        ("", 0, "expected a number, a fact, a function, a text or `(`; found the end"),
        ("ü", 0, "found `ü`"),
        ("a in b", 5, "`[`"),
    ];
    for (formula, at, part) in cases {
        let (found, text) = mistake(formula);
        assert_eq!(found, at, "{formula}: {text}");
        assert!(text.contains(part), "{formula}: {text}");
    }
}

#[test]
fn length_depth_and_operators_are_bounded() {
    let deep = |count: usize| format!("{}1{}", "(".repeat(count), ")".repeat(count));
    assert!(parse(&deep(MAX_DEPTH)).is_ok());
    assert_eq!(mistake(&deep(MAX_DEPTH + 1)).0, MAX_DEPTH);
    assert!(mistake(&"-".repeat(4_000)).1.contains("nested deeper than 32 levels"));
    assert!(mistake(&"a?".repeat(2_000)).1.contains("nested deeper"));
    assert!(mistake(&"1 ? 1 : ".repeat(50)).1.contains("nested deeper"));
    assert!(mistake(&"1+".repeat(1_000)).1.contains("more than 512"));
    assert!(mistake(&" ".repeat(4_097)).1.contains("4097 bytes; the limit is 4096"));
    assert!(parse(&format!("{}1", "1+".repeat(512))).is_ok());
    assert!(parse("'((((((((((((((((((((((((((((((((((((((((('=='a'").is_ok());
}
