//! The commands of a program as data: `pointsman completions` completes the commands of programs whose code
//! it does not contain.

use clap::{
    Arg, ArgAction, Command, ValueHint,
    builder::{PossibleValue, PossibleValuesParser, ValueRange},
};
use serde::{Deserialize, Serialize};

/// A command with its arguments and commands. Hidden ones are left out.
#[derive(Debug, Serialize, Deserialize)]
pub struct CommandTree {
    name: String,
    about: Option<String>,
    aliases: Vec<String>,
    arguments: Vec<Argument>,
    commands: Vec<CommandTree>,
}

/// Properties of an argument that completions need.
#[derive(Debug, Serialize, Deserialize)]
struct Argument {
    name: String,
    short: Option<char>,
    long: Option<String>,
    help: Option<String>,
    value_name: Option<String>,
    /// Least and most values of one occurrence; `None` if a flag without a value.
    values: Option<(usize, usize)>,
    /// Whether it may be given more than once.
    repeated: bool,
    /// Whether it stands behind `--`.
    last: bool,
    /// Whether its value is a path.
    path: bool,
    /// Possible values with their help; empty: any.
    choices: Vec<(String, Option<String>)>,
}

impl CommandTree {
    /// Describes a command.
    #[must_use]
    pub fn of(command: Command) -> Self {
        Self::of_ref(&command)
    }

    fn of_ref(command: &Command) -> Self {
        Self {
            name: command.get_name().to_owned(),
            about: command.get_about().map(ToString::to_string),
            aliases: command.get_visible_aliases().map(str::to_owned).collect(),
            arguments: command.get_arguments().filter(|own| !own.is_hide_set()).map(Argument::of).collect(),
            commands: command.get_subcommands().filter(|own| !own.is_hide_set()).map(Self::of_ref).collect(),
        }
    }

    /// Makes the commands below it again, for completions only. Their texts are never freed: a process does
    /// this once, and ends.
    #[must_use]
    pub fn into_commands(self) -> Vec<Command> {
        self.commands.into_iter().map(Self::into_command).collect()
    }

    fn into_command(self) -> Command {
        let mut command = Command::new(leaked(self.name));
        if let Some(about) = self.about {
            command = command.about(about);
        }
        for alias in self.aliases {
            command = command.visible_alias(leaked(alias));
        }
        command = command.args(self.arguments.into_iter().map(Argument::into_arg));
        command.subcommands(self.commands.into_iter().map(Self::into_command))
    }
}

impl Argument {
    fn of(arg: &Arg) -> Self {
        let takes_values = arg.get_action().takes_values();
        let values = arg.get_num_args().unwrap_or(ValueRange::SINGLE);
        let choice =
            |value: PossibleValue| (value.get_name().to_owned(), value.get_help().map(ToString::to_string));
        let value_names = arg.get_value_names().unwrap_or_default();
        Self {
            name: arg.get_id().to_string(),
            short: arg.get_short(),
            long: arg.get_long().map(str::to_owned),
            help: arg.get_help().map(ToString::to_string),
            value_name: value_names.first().map(ToString::to_string),
            values: takes_values.then(|| (values.min_values(), values.max_values())),
            repeated: matches!(arg.get_action(), ArgAction::Append | ArgAction::Count),
            last: arg.is_last_set(),
            path: matches!(
                arg.get_value_hint(),
                ValueHint::AnyPath | ValueHint::FilePath | ValueHint::DirPath
            ),
            choices: arg.get_possible_values().into_iter().map(choice).collect(),
        }
    }

    fn into_arg(self) -> Arg {
        let mut arg = Arg::new(leaked(self.name)).last(self.last);
        if let Some(short) = self.short {
            arg = arg.short(short);
        }
        if let Some(long) = self.long {
            arg = arg.long(leaked(long));
        }
        if let Some(help) = self.help {
            arg = arg.help(help);
        }
        let Some((least, most)) = self.values else {
            return arg.action(if self.repeated { ArgAction::Count } else { ArgAction::SetTrue });
        };
        if let Some(name) = self.value_name {
            arg = arg.value_name(leaked(name));
        }
        if self.path {
            arg = arg.value_hint(ValueHint::AnyPath);
        }
        if !self.choices.is_empty() {
            let choice = |(name, help): (String, Option<String>)| {
                let value = PossibleValue::new(leaked(name));
                help.into_iter().fold(value, PossibleValue::help)
            };
            arg = arg.value_parser(PossibleValuesParser::new(self.choices.into_iter().map(choice)));
        }
        arg.num_args(least..=most).action(if self.repeated { ArgAction::Append } else { ArgAction::Set })
    }
}

fn leaked(text: String) -> &'static str {
    text.leak()
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser, ValueEnum};

    use super::*;

    /// A program.
    #[derive(Parser)]
    #[command(name = "pointsman-x")]
    struct Cli {
        #[command(subcommand)]
        command: Own,
    }

    #[derive(clap::Subcommand)]
    enum Own {
        /// Compare.
        #[command(visible_alias = "cmp")]
        Compare {
            /// The trace.
            #[arg(short, long, value_name = "FILE")]
            trace: std::path::PathBuf,
            /// Shape.
            #[arg(long)]
            shape: Vec<Shape>,
            /// Only print.
            #[arg(long)]
            dry_run: bool,
            /// Words.
            #[arg(last = true)]
            words: Vec<String>,
        },
        #[command(hide = true)]
        Secret,
    }

    #[derive(Clone, Copy, ValueEnum)]
    enum Shape {
        /// Round.
        Circle,
        Square,
    }

    fn script(command: &mut Command) -> String {
        let mut script = Vec::new();
        clap_complete::generate(clap_complete::Shell::Zsh, command, "pointsman", &mut script);
        String::from_utf8(script).unwrap()
    }

    #[test]
    fn completions_of_a_tree_are_those_of_the_command() {
        let text = serde_json::to_string(&CommandTree::of(Cli::command())).unwrap();
        let tree: CommandTree = serde_json::from_str(&text).unwrap();
        let told = script(&mut Command::new("pointsman-x").subcommands(tree.into_commands()));
        let own = Cli::command().mut_subcommand("secret", |secret| secret.hide(true));
        let own = script(&mut own.clone());
        for part in ["--trace=[The trace]:FILE:_files", "circle", "Round", "--dry-run", "cmp", "words"] {
            assert!(own.contains(part) && told.contains(part), "{part}: {told}");
        }
        assert!(!told.contains("secret"), "{told}");
    }
}
