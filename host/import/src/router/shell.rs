//! The words of a command line as a shell reads them, as far as containers need it: `sh -c 'exec program …'`.

use anyhow::bail;

/// Shells that are given a script.
const SHELLS: [&str; 5] = ["sh", "bash", "dash", "ash", "zsh"];

/// Returns the script of `sh -c SCRIPT`; `None` if the arguments do not begin like that. Programs such as
/// `tini --` or `env A=1` may stand before the shell.
pub(super) fn script(arguments: &[String]) -> Option<&str> {
    let at = arguments.iter().position(|text| SHELLS.contains(&file_name(text)))?;
    if arguments.get(..at)?.iter().any(|text| text.starts_with("--") && text != "--") {
        return None;
    }
    let mut rest = arguments.get(at + 1..)?.iter();
    let options = rest.by_ref().find(|text| !text.starts_with('-') || text.contains('c'))?;
    if !options.starts_with('-') || options.starts_with("--") {
        None
    } else {
        rest.next().map(String::as_str)
    }
}

/// Splits a script into its commands and these into words.
///
/// # Errors
/// A quote is not closed.
pub(super) fn commands(script: &str) -> anyhow::Result<Vec<Vec<String>>> {
    let (mut all, mut words) = (Vec::new(), Vec::new());
    let mut word: Option<String> = None;
    let mut letters = script.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => match letters.next() {
                // A line that continues.
                Some('\n') | None => {}
                Some(other) => word.get_or_insert_default().push(other),
            },
            '\'' | '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match letters.next() {
                        None => bail!("the quote {letter} of the script is not closed"),
                        Some(other) if other == letter => break,
                        Some('\\') if letter == '"' => match letters.next() {
                            Some(other) if "\"\\$`".contains(other) => word.push(other),
                            Some('\n') | None => {}
                            Some(other) => word.extend(['\\', other]),
                        },
                        Some(other) => word.push(other),
                    }
                }
            }
            '#' if word.is_none() => while letters.next_if(|letter| *letter != '\n').is_some() {},
            ';' | '\n' | '|' | '&' => {
                // `2>&1` is not the end of a command.
                if letter == '&' && word.as_deref().is_some_and(|word| word.ends_with('>')) {
                    word.get_or_insert_default().push('&');
                    continue;
                }
                words.extend(word.take());
                if !words.is_empty() {
                    all.push(std::mem::take(&mut words));
                }
            }
            letter if letter.is_whitespace() => words.extend(word.take()),
            letter => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    if !words.is_empty() {
        all.push(words);
    }
    all.iter_mut().for_each(without_redirections);
    Ok(all)
}

/// Drops `> FILE`, `2>&1` and the like.
fn without_redirections(words: &mut Vec<String>) {
    let mut is_target = false;
    words.retain(|word| {
        if std::mem::take(&mut is_target) {
            return false;
        }
        let rest = word.trim_start_matches(|letter: char| letter.is_ascii_digit());
        if !rest.starts_with(['>', '<']) {
            return true;
        }
        is_target = rest.trim_start_matches(['>', '<']).is_empty();
        false
    });
}

/// Returns the last part of a path.
pub(super) fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(script: &str) -> Vec<Vec<String>> {
        commands(script).unwrap()
    }

    #[test]
    fn s3_words_are_those_of_a_shell() {
        let table: [(&str, &[&[&str]]); 8] = [
            ("a 'b c' \"d \\\" e\" f\\ g", &[&["a", "b c", "d \" e", "f g"]]),
            ("a \\\n  --b\n", &[&["a", "--b"]]),
            (
                "set -e; cd /x && exec a --b | tee c",
                &[&["set", "-e"], &["cd", "/x"], &["exec", "a", "--b"], &["tee", "c"]],
            ),
            ("a > /dev/null 2>&1 --b 2>> c", &[&["a", "--b"]]),
            ("# a comment\na # b", &[&["a"]]),
            ("a --b='{\"c\": 1}'", &[&["a", "--b={\"c\": 1}"]]),
            ("a '' \"\"", &[&["a", "", ""]]),
            ("", &[]),
        ];
        for (script, expected) in table {
            // S3.1
            assert_eq!(words(script), expected, "{script}");
        }
        assert!(commands("a 'b").unwrap_err().to_string().contains("is not closed"));
    }

    #[test]
    fn s3_the_script_of_a_shell_is_found() {
        let found = |line: &[&str]| {
            let line: Vec<String> = line.iter().map(|word| (*word).to_owned()).collect();
            script(&line).map(str::to_owned)
        };
        // S3.1
        assert_eq!(found(&["sh", "-c", "a b"]).as_deref(), Some("a b"));
        assert_eq!(found(&["tini", "--", "/bin/bash", "-e", "-lc", "a"]).as_deref(), Some("a"));
        assert_eq!(found(&["vllm-router", "--policy", "sh", "-c"]), None);
        assert_eq!(found(&["sh"]), None);
        assert_eq!(found(&["sh", "run.sh"]), None);
    }
}
