//! Commands for a shell.

use std::fmt::Write;

/// Commands that all run, whatever becomes of one of them: a node that a router does not reach must not keep the other nodes from their
/// routes. At its end, the script names what has failed, and fails.
#[derive(Default)]
pub(super) struct Script(String);

impl Script {
    /// Adds a command. `subject` is what the script names if the command fails.
    pub(super) fn run(&mut self, command: &str, subject: &str) {
        let _ = writeln!(self.0, "{}", remembered(command, subject));
    }

    /// Adds a command for a route to this node.
    pub(super) fn run_for(&mut self, command: &str, subject: &str, node: &str) {
        let _ = writeln!(self.0, "{} # {}", remembered(command, subject), one_line(node));
    }

    /// The text; none without commands.
    pub(super) fn end(self) -> String {
        if self.0.is_empty() {
            return String::new();
        }
        format!("failed=\n{}[ -z \"$failed\" ] || {{ echo \"failed:$failed\" >&2; false; }}\n", self.0)
    }
}

fn remembered(command: &str, subject: &str) -> String {
    format!("{command} || failed=\"$failed \"{}", quoted(subject))
}

/// Runs a command if a query prints anything. If the query fails, this fails.
pub(super) fn if_any(query: &str, command: &str) -> String {
    format!("found=$({query}) && {{ [ -z \"$found\" ] || {command}; }}")
}

/// A node's name in a comment. A name from a file may have line ends, after which a router would read commands.
pub(super) fn one_line(name: &str) -> String {
    name.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// An argument for a shell.
pub(super) fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn names_in_comments_have_no_line_ends() {
        assert_eq!(one_line("alpha\nreboot\r"), "alpha?reboot?");
    }

    #[test]
    fn arguments_of_a_shell_are_quoted_where_necessary() {
        for (text, expected) in [
            ("rtb-0a", "rtb-0a"),
            ("my group", "'my group'"),
            ("", "''"),
            ("it's", r"'it'\''s'"),
            ("$x", "'$x'"),
        ] {
            assert_eq!(quoted(text), expected);
        }
    }

    /// Each row: commands, what a shell prints, and whether it succeeds. The shell may end at a failed command (`-e`).
    #[test]
    fn a_command_that_fails_does_not_end_a_script() {
        let present = if_any("echo x", "echo deleted");
        let absent = if_any("true", "echo deleted");
        let unknown = if_any("false", "echo deleted");
        for (commands, expected, succeeds) in [
            (&["echo a", "echo b"][..], "a\nb\n", true),
            (&["false", "echo b", "false"], "b\nfailed: it's 0 it's 2\n", false),
            (&[&present, &absent], "deleted\n", true),
            (&[&unknown, "echo b"], "b\nfailed: it's 0\n", false),
        ] {
            let mut script = Script::default();
            for (number, command) in commands.iter().enumerate() {
                script.run_for(command, &format!("it's {number}"), "node\nreboot");
            }
            let text = format!("exec 2>&1\n{}", script.end());
            for options in ["-c", "-ec"] {
                let output = Command::new("sh").args([options, &text]).output().unwrap();
                assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{text}");
                assert_eq!(output.status.success(), succeeds, "{text}");
            }
        }
        assert_eq!(Script::default().end(), "");
    }
}
