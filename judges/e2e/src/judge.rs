//! Judges pods with connections: the pods and their logs at two moments in, a verdict out.

use std::collections::BTreeMap;
use std::time::Duration;

/// What a client prints for each line that a server sends, twice a second.
const RECEIVED: &str = "meow";
/// The seconds in which a client receives one line at least, and in which a visitor reaches or misses each target once at least. Both
/// are twice what they need on an idle machine.
const SECONDS_FOR_A_LINE: u64 = 1;
const SECONDS_FOR_AN_ATTEMPT: u64 = 4;

/// What a pod does, by its label `app`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    /// Sends a line to each connection twice a second.
    Server,
    /// Keeps a connection, and prints each line that it receives.
    Client,
    /// Connects to each target again and again. Policy keeps it out.
    Stranger,
    /// Does the same, and policy admits it.
    Friend,
}

impl Role {
    pub(super) const ALL: [Self; 4] = [Self::Server, Self::Client, Self::Stranger, Self::Friend];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Client => "client",
            Self::Stranger => "stranger",
            Self::Friend => "friend",
        }
    }

    /// The number of pods, as in `traffic.yaml`.
    pub(super) fn pods(self) -> usize {
        match self {
            Self::Server | Self::Stranger => 4,
            Self::Client => 8,
            Self::Friend => 2,
        }
    }
}

/// A pod at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pod {
    pub(super) role: Role,
    pub(super) uid: String,
    pub(super) restarts: u64,
    pub(super) is_ready: bool,
    /// What it has printed since its start.
    pub(super) lines: Vec<String>,
}

/// The pods at one moment, by name.
pub(super) type Pods = BTreeMap<String, Pod>;

/// What must become of strangers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Strangers {
    /// There is no policy: each of them reaches each target.
    GetIn,
    /// Policy keeps each of them out.
    StayOut,
}

/// A time between two moments.
pub(super) struct Phase<'a> {
    pub(super) before: &'a Pods,
    pub(super) after: &'a Pods,
    pub(super) lasted: Duration,
    /// The addresses that strangers and friends connect to.
    pub(super) targets: &'a [String],
    pub(super) strangers: Strangers,
}

/// What was counted in a phase without a problem.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// The lines that clients received.
    pub(super) received: usize,
    /// How often strangers got in.
    pub(super) admitted: usize,
    /// How often strangers were kept out.
    pub(super) refused: usize,
    /// How often friends got in.
    pub(super) friends: usize,
}

/// Judges a phase. The error has a line for each problem.
pub(super) fn judge(phase: &Phase<'_>) -> Result<Counts, Vec<String>> {
    let mut problems: Vec<String> = Role::ALL.into_iter().filter_map(|role| missing(phase, role)).collect();
    let mut counts = Counts::default();
    for (name, before) in phase.before {
        match same_pod(name, before, phase.after.get(name)) {
            Ok(lines) => problems.extend(of_pod(phase, name, before.role, lines, &mut counts)),
            Err(problem) => problems.push(problem),
        }
    }
    if problems.is_empty() { Ok(counts) } else { Err(problems) }
}

/// Whether pods of this role are missing.
fn missing(phase: &Phase<'_>, role: Role) -> Option<String> {
    let found = phase.before.values().filter(|pod| pod.role == role).count();
    (found != role.pods()).then(|| format!("{found} pods are {}s, not {}", role.label(), role.pods()))
}

/// The lines of this phase, if the pod is the same one all the time.
fn same_pod<'a>(name: &str, before: &Pod, after: Option<&'a Pod>) -> Result<&'a [String], String> {
    let after = after.ok_or_else(|| format!("{name} is gone"))?;
    if after.uid != before.uid {
        return Err(format!("{name} is another pod of the same name"));
    }
    if after.restarts != before.restarts {
        return Err(format!("{name} was restarted, and has lost its log"));
    }
    if !after.is_ready {
        return Err(format!("{name} is not ready"));
    }
    after.lines.get(before.lines.len()..).ok_or_else(|| format!("{name} has lost a part of its log"))
}

/// The problems of a pod.
fn of_pod(phase: &Phase<'_>, name: &str, role: Role, lines: &[String], counts: &mut Counts) -> Vec<String> {
    match role {
        Role::Server => Vec::new(),
        Role::Client => of_client(phase, name, lines, counts),
        Role::Stranger if phase.strangers == Strangers::StayOut => {
            let visits = Visits::of(lines);
            counts.refused += visits.refused.values().sum::<usize>();
            let admitted =
                visits.admitted.iter().map(|(to, times)| format!("{name} got in {times} times: {to}"));
            admitted
                .chain(visits.failed(name))
                .chain(rare(phase, name, "kept out", &visits.refused))
                .collect()
        }
        Role::Stranger | Role::Friend => {
            let visits = Visits::of(lines);
            let admitted = visits.admitted.values().sum::<usize>();
            match role {
                Role::Stranger => counts.admitted += admitted,
                _ => counts.friends += admitted,
            }
            // On a busy machine, a second is not always enough for a connection.
            visits.failed(name).chain(rare(phase, name, "admitted", &visits.admitted)).collect()
        }
    }
}

fn of_client(phase: &Phase<'_>, name: &str, lines: &[String], counts: &mut Counts) -> Vec<String> {
    let received = lines.iter().filter(|line| *line == RECEIVED).count();
    counts.received += received;
    let mut problems: Vec<String> =
        lines.iter().filter(|line| *line != RECEIVED).map(|line| format!("{name}: {line}")).collect();
    let least = least(phase.lasted, SECONDS_FOR_A_LINE);
    if received < least {
        problems.push(format!("{name} received {received} lines, and should have received {least} at least"));
    }
    problems
}

/// How often something happens at least.
fn least(lasted: Duration, seconds: u64) -> usize {
    usize::try_from(lasted.as_secs() / seconds).unwrap_or(usize::MAX).max(1)
}

/// A problem for each target with which something happened less often than plausible.
fn rare(phase: &Phase<'_>, name: &str, what: &str, times: &BTreeMap<&str, usize>) -> Vec<String> {
    let least = least(phase.lasted, SECONDS_FOR_AN_ATTEMPT);
    let counted = phase.targets.iter().map(|to| (to, times.get(to.as_str()).copied().unwrap_or_default()));
    counted
        .filter(|(_, times)| *times < least)
        .map(|(to, times)| {
            format!("{name} was {what} {times} times by {to}, and should have been {least} times at least")
        })
        .collect()
}

/// What a stranger or a friend has printed: `in TARGET`, `out TARGET` after a second without an answer, or anything else.
#[derive(Default)]
struct Visits<'a> {
    admitted: BTreeMap<&'a str, usize>,
    refused: BTreeMap<&'a str, usize>,
    others: Vec<&'a str>,
}

impl<'a> Visits<'a> {
    fn of(lines: &'a [String]) -> Self {
        let mut visits = Self::default();
        for line in lines {
            match line.split_once(' ') {
                Some(("in", to)) => *visits.admitted.entry(to).or_default() += 1,
                Some(("out", to)) => *visits.refused.entry(to).or_default() += 1,
                _ => visits.others.push(line),
            }
        }
        visits
    }

    /// What is neither: a denial by policy is silent, so that any other answer says nothing about policy.
    fn failed(&self, name: &str) -> impl Iterator<Item = String> {
        self.others.iter().map(move |line| format!("{name}: {line}"))
    }
}

/// Whether policy has come into force for each stranger: its last visit of each target failed.
pub(super) fn strangers_are_out(before: &Pods, after: &Pods, targets: &[String]) -> bool {
    let strangers: Vec<_> = after.iter().filter(|(_, pod)| pod.role == Role::Stranger).collect();
    let is_out = |name: &String, pod: &Pod| {
        let seen = before.get(name).map_or(0, |pod| pod.lines.len());
        let new = pod.lines.get(seen..).unwrap_or_default();
        let last = |to: &String| new.iter().rev().find_map(|line| line.strip_suffix(&format!(" {to}")));
        targets.iter().all(|to| last(to) == Some("out"))
    };
    !targets.is_empty()
        && strangers.len() == Role::Stranger.pods()
        && strangers.into_iter().all(|(name, pod)| is_out(name, pod))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LASTED: Duration = Duration::from_secs(40);
    const TARGETS: [&str; 2] = ["10.96.0.7", "10.244.1.9"];

    fn targets() -> Vec<String> {
        TARGETS.map(str::to_owned).to_vec()
    }

    /// The lines of a pod of a phase in which all is well.
    fn good(role: Role, strangers: Strangers) -> Vec<String> {
        let visits = |word: &str| -> Vec<String> {
            (0..20).flat_map(|_| TARGETS.map(|to| format!("{word} {to}"))).collect()
        };
        match (role, strangers) {
            (Role::Server, _) => Vec::new(),
            (Role::Client, _) => vec![RECEIVED.to_owned(); 78],
            (Role::Stranger, Strangers::StayOut) => visits("out"),
            (Role::Stranger, Strangers::GetIn) | (Role::Friend, _) => visits("in"),
        }
    }

    fn pods(lines: impl Fn(Role) -> Vec<String>) -> Pods {
        let all = Role::ALL.into_iter().flat_map(|role| (0..role.pods()).map(move |number| (role, number)));
        all.map(|(role, number)| {
            let name = format!("{}-{number}", role.label());
            let pod =
                Pod { role, uid: format!("of {name}"), restarts: 0, is_ready: true, lines: lines(role) };
            (name, pod)
        })
        .collect()
    }

    /// Judges a phase in which all is well, except for a change of the pods before or after it.
    fn verdict(strangers: Strangers, change: impl Fn(&mut Pods, &mut Pods)) -> Result<Counts, String> {
        let mut before = pods(|_| vec!["lost, long ago".to_owned()]);
        let mut after = pods(|role| [vec!["lost, long ago".to_owned()], good(role, strangers)].concat());
        change(&mut before, &mut after);
        let phase = Phase { before: &before, after: &after, lasted: LASTED, targets: &targets(), strangers };
        judge(&phase).map_err(|problems| problems.join("\n"))
    }

    fn pod<'a>(pods: &'a mut Pods, name: &str) -> &'a mut Pod {
        pods.get_mut(name).unwrap()
    }

    #[test]
    fn a_phase_in_which_all_is_well_passes_with_its_counts() {
        let (received, friends) = (8 * 78, 2 * 40);
        let kept_out = Counts { received, admitted: 0, refused: 4 * 40, friends };
        assert_eq!(verdict(Strangers::StayOut, |_, _| ()), Ok(kept_out));
        let admitted = Counts { received, admitted: 4 * 40, refused: 0, friends };
        assert_eq!(verdict(Strangers::GetIn, |_, _| ()), Ok(admitted));
    }

    /// A change of the pods before and after, its name, and a part of the verdict.
    type Case = (&'static str, fn(&mut Pods, &mut Pods), &'static str);

    const CASES: [Case; 17] = [
        (
            "a client has no log",
            |_, after| pod(after, "client-3").lines.truncate(1),
            "client-3 received 0 lines",
        ),
        (
            "a client is half as fast",
            |_, after| pod(after, "client-3").lines.truncate(40),
            "received 39 lines",
        ),
        (
            "a connection is lost",
            |_, after| pod(after, "client-0").lines.push("lost".to_owned()),
            "client-0: lost",
        ),
        ("a client is restarted", |_, after| pod(after, "client-1").restarts = 1, "client-1 was restarted"),
        (
            "a stranger is restarted",
            |_, after| pod(after, "stranger-1").restarts = 1,
            "stranger-1 was restarted",
        ),
        ("a server is restarted", |_, after| pod(after, "server-1").restarts = 1, "server-1 was restarted"),
        ("a client is replaced", |_, after| pod(after, "client-1").uid.push('!'), "client-1 is another pod"),
        ("a client is gone", |_, after| drop(after.remove("client-7")), "client-7 is gone"),
        (
            "a client was never there",
            |before, _| drop(before.remove("client-7")),
            "7 pods are clients, not 8",
        ),
        (
            "no stranger was there",
            |before, _| before.retain(|_, pod| pod.role != Role::Stranger),
            "0 pods are strangers",
        ),
        (
            "a log is shorter",
            |_, after| pod(after, "friend-0").lines.clear(),
            "friend-0 has lost a part of its log",
        ),
        ("a pod is not ready", |_, after| pod(after, "friend-1").is_ready = false, "friend-1 is not ready"),
        (
            "one stranger gets in once",
            |_, after| pod(after, "stranger-2").lines.push(format!("in {}", TARGETS[1])),
            "stranger-2 got in 1 times: 10.244.1.9",
        ),
        (
            "a stranger tries one target only",
            |_, after| pod(after, "stranger-2").lines.retain(|line| !line.ends_with(TARGETS[0])),
            "stranger-2 was kept out 0 times by 10.96.0.7",
        ),
        (
            "a stranger tries rarely",
            |_, after| pod(after, "stranger-2").lines.truncate(1 + 2 * 9),
            "stranger-2 was kept out 9 times by 10.96.0.7, and should have been 10 times",
        ),
        (
            "a stranger's failures have another cause",
            |_, after| pod(after, "stranger-2").lines.push("error 10.244.1.9 refused".to_owned()),
            "stranger-2: error 10.244.1.9 refused",
        ),
        (
            "nobody gets in, because the servers are gone",
            |_, after| {
                pod(after, "friend-0").lines.iter_mut().for_each(|line| *line = line.replace("in ", "out "));
            },
            "friend-0 was admitted 0 times by 10.96.0.7",
        ),
    ];

    #[test]
    fn each_thing_that_goes_wrong_is_a_problem() {
        for (name, change, expected) in CASES {
            let problem = verdict(Strangers::StayOut, change).expect_err(name);
            assert!(problem.contains(expected), "{name}: {problem}");
        }
    }

    #[test]
    fn without_policy_each_stranger_must_get_in() {
        let all_out = |_: &mut Pods, after: &mut Pods| {
            pod(after, "stranger-0").lines.iter_mut().for_each(|line| *line = line.replace("in ", "out "));
        };
        let problem = verdict(Strangers::GetIn, all_out).unwrap_err();
        assert!(problem.contains("stranger-0 was admitted 0 times by 10.96.0.7"), "{problem}");
        assert!(!problem.contains("stranger-1"), "{problem}");
    }

    #[test]
    fn policy_is_in_force_when_the_last_visit_of_each_stranger_to_each_target_fails() {
        let before = pods(|role| good(role, Strangers::GetIn));
        let after = |change: fn(&mut Pods)| {
            let mut after =
                pods(|role| [good(role, Strangers::GetIn), good(role, Strangers::StayOut)].concat());
            change(&mut after);
            strangers_are_out(&before, &after, &targets())
        };
        assert!(after(|_| ()));
        assert!(!strangers_are_out(&before, &before, &targets()), "nobody has tried");
        assert!(!after(|pods| pod(pods, "stranger-3").lines.push(format!("in {}", TARGETS[0]))));
        assert!(!after(|pods| pod(pods, "stranger-3").lines.push(format!("error {}", TARGETS[0]))));
        assert!(!after(|pods| drop(pods.remove("stranger-3"))));
    }
}
