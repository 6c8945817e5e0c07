//! Comments in tests that name the clauses which an assertion proves: `// B1.2`, `// B1.2, B1.3: why`.

use super::behaviour::is_clause;

/// A clause named in a test.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) clause: String,
    pub(super) file: String,
    pub(super) line: usize,
    /// Function that contains the assertion: a test, or a helper, which the compiler reports if no test calls
    /// it.
    pub(super) function: String,
}

/// Finds the marks of a Rust file, and the problems with them.
pub(super) fn marks(file: &str, source: &str) -> (Vec<Mark>, Vec<String>) {
    let lines: Vec<&str> = source.lines().collect();
    let (mut marks, mut problems) = (Vec::new(), Vec::new());
    for (number, line) in lines.iter().enumerate() {
        let named = match clauses(line) {
            None => continue,
            Some(Err(problem)) => {
                problems.push(format!("{file}:{}: {problem}", number + 1));
                continue;
            }
            Some(Ok(named)) => named,
        };
        match function_around(file, &lines, number) {
            Ok(function) => marks.extend(named.into_iter().map(|clause| Mark {
                clause,
                file: file.to_owned(),
                line: number + 1,
                function: function.to_owned(),
            })),
            Err(problem) => problems.push(format!("{file}:{}: {} {problem}", number + 1, named.join(", "))),
        }
    }
    (marks, problems)
}

/// Returns the clauses that a line names, or `None` if the line is not a mark.
fn clauses(line: &str) -> Option<Result<Vec<String>, String>> {
    let text = line.trim_start().strip_prefix("// ")?;
    let first = text.split([' ', ',', ':']).next()?;
    if !is_clause(first) {
        return None;
    }
    let list = text.split_once(':').map_or(text, |(list, _)| list).trim_end();
    let ids: Vec<String> = list.split(", ").map(str::to_owned).collect();
    let wrong = ids.iter().find(|id| !is_clause(id));
    Some(match wrong {
        None => Ok(ids),
        Some(wrong) => Err(format!("`{wrong}` is not a clause's id: write `// {first}, …: reason`")),
    })
}

/// Returns the function that contains the line, or the reason why the line proves nothing.
fn function_around<'l>(file: &str, lines: &[&'l str], number: usize) -> Result<&'l str, String> {
    let is_comment = |line: &&&str| line.trim_start().starts_with("//");
    let code = lines.iter().skip(number).find(|line| !is_comment(line)).map_or("", |line| line.trim());
    if code.is_empty() || code.starts_with(['}', ')', '#']) {
        return Err("stands above no assertion: move it directly above one".to_owned());
    }
    if !is_test_code(file, lines, number) {
        return Err("stands outside of tests: name clauses in tests only".to_owned());
    }
    let indentation = |line: &str| line.len() - line.trim_start().len();
    let own = lines.get(number).map_or(0, |line| indentation(line));
    let mut above = lines.iter().take(number).rev().filter(|line| indentation(line) < own);
    let name = |line: &&'l str| line.split_once("fn ")?.1.split(['(', '<']).next();
    let function = above.find_map(name).ok_or("stands in no function")?;
    let attributes =
        above.map(|line| line.trim()).take_while(|line| !line.is_empty() && !line.ends_with('}'));
    if attributes.into_iter().any(|line| line.starts_with("#[ignore")) {
        return Err(format!("stands in `{function}`, which a normal run of the tests ignores"));
    }
    Ok(function)
}

/// Whether a line belongs to a file of tests or to a module of tests.
fn is_test_code(file: &str, lines: &[&str], number: usize) -> bool {
    let in_tests = |part: &str| part == "tests" || part == "tests.rs";
    let module = || {
        let before = lines.iter().take(number);
        let is_module = |line: &str| line.trim_start().starts_with("mod ") && line.ends_with('{');
        let mut gated = false;
        before.fold(false, |found, line| {
            let found = found || (gated && is_module(line));
            gated = line.trim() == "#[cfg(test)]" || (gated && line.trim_start().starts_with('#'));
            found
        })
    };
    file.split('/').any(in_tests) || module()
}

#[cfg(test)]
mod tests {
    use super::{Mark, marks};

    const SOURCE: &str = "fn product() {\n    // B1.1\n    run();\n}\n\n#[cfg(test)]\n#[expect(x)]\nmod tests {\n    \
        #[test]\n    fn b1_works() {\n        // B1.1, I_shed: both at once\n        // and more\n        \
        assert!(true);\n        check(1);\n    }\n\n    fn check(n: u8) {\n        // B1.2\n        \
        assert_eq!(n, 1);\n    }\n\n    \
        #[test]\n    fn end() {\n        // B1.4\n    }\n\n    // B1 is a rule\n    #[test]\n    \
        fn wrong() {\n        // B1.5 holds\n        assert!(true);\n    }\n}\n";

    #[test]
    fn a_mark_names_its_function() {
        let (marks, problems) = marks("src/a.rs", SOURCE);
        let mark = |clause: &str, line, function: &str| Mark {
            clause: clause.to_owned(),
            file: "src/a.rs".to_owned(),
            line,
            function: function.to_owned(),
        };
        let expected =
            [mark("B1.1", 11, "b1_works"), mark("I_shed", 11, "b1_works"), mark("B1.2", 18, "check")];
        assert_eq!(marks, expected);
        let starts = ["2: B1.1 stands outside", "24: B1.4 stands above no", "30: `B1.5 holds`"];
        let problems: Vec<&str> = problems.iter().map(|text| text.trim_start_matches("src/a.rs:")).collect();
        assert_eq!(problems.len(), starts.len(), "{problems:?}");
        for (problem, start) in problems.iter().zip(starts) {
            assert!(problem.starts_with(start), "{problem} is not {start}");
        }
    }

    #[test]
    fn ignored_tests_prove_nothing() {
        let source = "#[test]\n#[ignore = \"slow\"]\nfn a() {\n    // B1.1\n    assert!(true);\n}\n";
        let (marks, problems) = marks("tests/a.rs", source);
        assert!(marks.is_empty() && problems.len() == 1, "{marks:?} {problems:?}");
    }
}
