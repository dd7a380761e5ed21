//! Tables of the legacy `iptables`: what they may drop is reported, and what Calico has left there goes. Debian's
//! `iptables-legacy` fills the tables and shows what is left.

use std::fmt::Write as _;
use std::process::Command;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use testkit::random::Random;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::leftovers::Marks;
use tortie_kernel::xtables::{Legacy, LegacyFamily, remove_marked};

use crate::dataplane::foreign_tables::run;

const MARKS: Marks<'static> = Marks { tables: &["calico"], chains: "cali-", comments: "cali:" };
/// A rule may lead to later chains only, because the kernel refuses loops.
const CHAINS: [&str; 8] =
    ["INPUT", "FORWARD", "OUTPUT", "cali-FORWARD", "california", "mine", "cali-tw-1", "last"];
const BUILT_IN: usize = 3;

/// A rule: the chain, the condition, the comment, and what it does: a later chain, with or without return, or a target.
#[derive(Debug, Clone)]
struct Rule {
    chain: usize,
    condition: &'static str,
    comment: &'static str,
    target: usize,
    goto: bool,
}

const CONDITIONS: [&str; 5] = [
    "",
    "-m conntrack --ctstate INVALID",
    "-p tcp -m tcp --dport 25",
    "-m mark --mark 0x7",
    "-p udp -m multiport --dports 1,2",
];
const COMMENTS: [&str; 3] = ["", "cali:wUHhoiAYhphO9Mso", "cali: a note of mine"];
const TARGETS: [&str; 6] = ["", "-j ACCEPT", "-j DROP", "-j RETURN", "-j MARK --set-xmark 0x7/0x7", "-j LOG"];

fn rule() -> impl Strategy<Value = Rule> {
    let targets = 0..TARGETS.len() + CHAINS.len();
    let parts =
        (0..CHAINS.len(), select(CONDITIONS.to_vec()), select(COMMENTS.to_vec()), targets, any::<bool>());
    parts.prop_map(|(chain, condition, comment, target, goto)| Rule {
        chain,
        condition,
        comment,
        target,
        goto,
    })
}

impl Rule {
    /// The text of the rule, and whether it is Calico's.
    fn text(&self) -> (String, bool) {
        let chain = CHAINS[self.chain];
        let mut text = format!("-A {chain}");
        if !self.condition.is_empty() {
            write!(text, " {}", self.condition).unwrap();
        }
        if !self.comment.is_empty() {
            write!(text, " -m comment --comment \"{}\"", self.comment).unwrap();
        }
        let mut is_calicos = chain.starts_with("cali-") || self.comment == COMMENTS[1];
        let later = self.target.checked_sub(TARGETS.len()).filter(|to| *to >= BUILT_IN && *to > self.chain);
        if let Some(to) = later {
            write!(text, " -{} {}", if self.goto { 'g' } else { 'j' }, CHAINS[to]).unwrap();
            is_calicos |= CHAINS[to].starts_with("cali-");
        } else if let Some(target) = TARGETS.get(self.target).filter(|target| !target.is_empty()) {
            write!(text, " {target}").unwrap();
        }
        (text, is_calicos)
    }
}

/// What the program prints in the namespace.
fn printed(namespace: &NetNs, script: &str) -> String {
    let mut command = Command::new("sh");
    command.args(["-ec", script]);
    let output = namespace.enter_on_spawn(&mut command).unwrap().output().unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The chains and rules of the table, without counters and comments.
fn saved(namespace: &NetNs, program: &str) -> Vec<String> {
    let text = printed(namespace, &format!("{program}-legacy-save -t filter"));
    let lines = text.lines().filter(|line| line.starts_with([':', '-']));
    lines.map(|line| line.split(" [").next().unwrap().trim_end().to_owned()).collect()
}

/// Whatever the table has, exactly what is Calico's goes, and `iptables` understands what is left.
#[test]
fn what_calico_left_goes_and_everything_else_stays() {
    let namespace = NetNs::create().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let lock = folder.path().join("lock");
    let policies = select(vec!["ACCEPT", "DROP"]);
    let case = (vec(rule(), 0..25), policies, select(LegacyFamily::ALL.to_vec()));
    let test = |(rules, policy, family): (Vec<Rule>, &str, LegacyFamily)| {
        let program = family.program();
        let mut text = format!("*filter\n:INPUT ACCEPT\n:FORWARD {policy}\n:OUTPUT ACCEPT\n");
        CHAINS[BUILT_IN..].iter().for_each(|name| writeln!(text, ":{name} -").unwrap());
        rules.iter().for_each(|rule| writeln!(text, "{}", rule.text().0).unwrap());
        run(&namespace, &format!("{program}-legacy-restore <<'END'\n{text}COMMIT\nEND"));

        let before = saved(&namespace, program);
        let has_mark = |line: &String| {
            let words: Vec<&str> = line.split_whitespace().collect();
            line.starts_with(":cali-")
                || words
                    .windows(2)
                    .any(|pair| matches!(pair[0], "-A" | "-j" | "-g") && pair[1].starts_with("cali-"))
                || line.contains("\"cali:wUHh")
                || line.contains(" cali:wUHh")
        };
        let expected: Vec<String> = before.iter().filter(|line| !has_mark(line)).cloned().collect();
        let of_calico = rules.iter().filter(|rule| rule.text().1).count();
        let rules_before = before.iter().filter(|line| line.starts_with('-')).count();
        let rules_left = expected.iter().filter(|line| line.starts_with('-')).count();
        prop_assert_eq!(rules_before - rules_left, of_calico, "the test's own view: {:?}", before);

        let remove = || remove_marked(family, "filter", MARKS, &lock);
        namespace.run(remove).unwrap().map_err(|error| TestCaseError::fail(format!("{error}: {text}")))?;
        prop_assert_eq!(saved(&namespace, program), expected, "{}", text);
        let again = namespace.run(|| Legacy::read(family, "filter").unwrap().marked(MARKS)).unwrap();
        prop_assert_eq!(again, vec![]);
        Ok(())
    };
    Random::cases(100).shrinking(200).run(&case, test).unwrap();
}

/// Somebody changes legacy tables at the same time, with the lock that all programs take.
#[test]
fn changes_of_others_at_the_same_time_are_kept() {
    const ROUNDS: usize = 50;
    let namespace = NetNs::create().unwrap();
    run(&namespace, "iptables-legacy -N cali-A");
    let theirs = std::thread::scope(|scope| {
        let theirs = scope.spawn(|| {
            (0..ROUNDS).for_each(|number| {
                run(
                    &namespace,
                    &format!("iptables-legacy -w -A FORWARD -p tcp --dport {} -j DROP", number + 1),
                );
            });
        });
        while !theirs.is_finished() {
            // The number of entries stays the same, so the kernel cannot notice the race.
            run(&namespace, "iptables-legacy -w -A FORWARD -j cali-A");
            let remove =
                || remove_marked(LegacyFamily::V4, "filter", MARKS, tortie_kernel::xtables::LOCK.as_ref());
            namespace.run(remove).unwrap().unwrap();
            run(&namespace, "iptables-legacy -w -N cali-A");
        }
        theirs.join()
    });
    theirs.unwrap();
    let left = saved(&namespace, "iptables");
    assert_eq!(left.iter().filter(|line| line.contains("--dport")).count(), ROUNDS, "{left:#?}");
}
