//! Negative numbers as values of options: without this, clap takes `-1` for a flag and advises `-- -1`, and
//! the error of the option's own range is never shown.

use clap::{ArgAction, Command, Parser};

/// Reads the command line of the process.
#[must_use]
pub fn parse<C: Parser>() -> C {
    let mut matches = with_negative_numbers(C::command()).get_matches();
    C::from_arg_matches_mut(&mut matches).unwrap_or_else(|error| error.format(&mut C::command()).exit())
}

/// Makes a negative number the value of the option before it, in the command and in all commands below it.
#[must_use]
pub fn with_negative_numbers(command: Command) -> Command {
    let command = command.mut_args(|arg| {
        let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
        let is_option = arg.get_long().is_some() && takes_value;
        if is_option { arg.allow_negative_numbers(true) } else { arg }
    });
    command.mut_subcommands(with_negative_numbers)
}
