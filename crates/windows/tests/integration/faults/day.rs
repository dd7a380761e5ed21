//! A day of virtual time: policies change again and again while HNS fails and recovers.

use super::*;

const MINUTE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// A change of the cluster, with a fault of HNS.
#[derive(Debug, Clone)]
struct Step {
    /// The objects that exist, by their number modulo 64. Nodes and pods always do.
    exist: u64,
    /// The fault from this change on, the call at which it occurs, and the number of calls before a late one.
    fault: Option<(Fault, usize, usize, bool)>,
    /// The nodes with the fault.
    on: [bool; NODES.len()],
    /// The time until the agents compare everything with HNS, in minutes.
    pause: u32,
    /// Whether HNS is well afterwards.
    recovers: bool,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let fault = (select(FAULTS.to_vec()), 0_usize..6, 0_usize..8, any::<bool>());
    let step =
        (any::<u64>(), prop::option::weighted(0.7, fault), any::<[bool; 2]>(), 1_u32..30, any::<bool>());
    let step = step.prop_map(|(exist, fault, on, pause, recovers)| {
        let on = std::array::from_fn(|node| on[node % 2]);
        Step { exist, fault, on, pause, recovers }
    });
    prop::collection::vec(step, 130)
}

/// Verdicts of states that may be in force.
struct Possible<'a> {
    flows: &'a [Flow],
    /// The oldest one was in force everywhere.
    states: Vec<Vec<Ends<bool>>>,
    /// Whether HNS has lost ACLs since then.
    loses: bool,
}

impl Possible<'_> {
    /// The flow that passes an end which denies it in each of the states. An HNS that has returned without ACLs is open until the endpoint is
    /// checked.
    fn opened(&self, cluster: &EmulatedCluster) -> Option<Flow> {
        let now = verdicts(cluster, self.flows);
        let is_open = |index: usize, end: fn(&Ends<bool>) -> Option<bool>, endpoint: Option<&Endpoint>| {
            let is_as_it_came_back = self.loses && !endpoint.is_some_and(has_policy);
            let denies = |state: &Vec<Ends<bool>>| end(&state[index]) == Some(false);
            end(&now[index]) == Some(true) && self.states.iter().all(denies) && !is_as_it_came_back
        };
        let opened = (0..self.flows.len()).find(|index| {
            let endpoints = cluster.endpoints(&self.flows[*index]).unwrap();
            is_open(*index, |ends| ends.egress, endpoints.egress.as_ref())
                || is_open(*index, |ends| ends.ingress, endpoints.ingress.as_ref())
        });
        opened.map(|index| self.flows[index])
    }
}

/// The objects of a case that exist.
fn objects(case: &Case, exist: u64) -> Objects {
    let stays = |(index, (key, _)): &(usize, &(Key, Value))| {
        matches!(key.kind, Kind::WorkloadEndpoint | Kind::Node) || exist >> (index % 64) & 1 == 1
    };
    case.after.iter().enumerate().filter(stays).map(|(_, object)| object.clone()).collect()
}

/// The faults that occurred, and the changes of verdicts.
#[derive(Debug, Default)]
struct Seen {
    faults: Arc<AtomicUsize>,
    changes: AtomicUsize,
}

fn through_a_day(case: &Case, steps: &[Step], seen: &Seen) -> Result<(), String> {
    let mut cluster = fresh(&case.after, case);
    let flows: Vec<Flow> = case.flows.iter().filter(|flow| cluster.is_of_pods(flow)).copied().collect();
    if verdicts(&cluster, &flows) == verdicts(&fresh(&objects(case, 0), case), &flows) {
        // No policy of this cluster is about these flows.
        return Ok(());
    }
    let mut possible = Possible { flows: &flows, states: vec![verdicts(&cluster, &flows)], loses: false };
    let (mut time, mut is_well) = (Duration::ZERO, true);
    for (number, step) in steps.iter().enumerate() {
        if time >= DAY {
            return Ok(());
        }
        let objects = objects(case, step.exist);
        let new = verdicts(&fresh(&objects, case), &flows);
        seen.changes.fetch_add(usize::from(possible.states.last() != Some(&new)), Ordering::Relaxed);
        possible.states.push(new.clone());
        if let Some((fault, at, later, in_call)) = step.fault {
            let failing = Case { fault, at, later, in_call, ..case.clone() };
            (0..NODES.len())
                .filter(|node| step.on[*node])
                .for_each(|node| fail(&cluster, node, &failing, &seen.faults));
            possible.loses |= matches!(fault, Fault::Restarts(survives) if survives != Survives::Everything);
            is_well = false;
        }
        let began = time;
        let at = |what: &str| format!("step {number}, after {began:?}, {step:?}: {what}");
        let check = |cluster: &EmulatedCluster, possible: &Possible<'_>| match possible.opened(cluster) {
            Some(flow) => Err(at(&format!("opened: {flow:?}"))),
            None => Ok(()),
        };
        cluster.change(&objects).unwrap();
        check(&cluster, &possible)?;
        cluster.wait(MINUTE * step.pause);
        cluster.resync();
        check(&cluster, &possible)?;
        time += MINUTE * step.pause;
        if step.recovers || is_well {
            (0..NODES.len()).for_each(|node| cluster.hns(node).clear_fault());
            cluster.wait(LONG);
            time += LONG;
            let reports = cluster.resync();
            if reports.iter().any(|report| report.retry) || verdicts(&cluster, &flows) != new {
                return Err(at(&format!("HNS is well again, and it is not in force: {reports:?}")));
            }
            (possible.states, possible.loses, is_well) = (vec![new], false, true);
        }
    }
    Err(format!("only {time:?} have passed"))
}

#[test]
fn nothing_opens_in_a_day_of_faults() {
    let seen = Seen::default();
    let test = |(case, steps): (Case, Vec<Step>)| {
        through_a_day(&case, &steps, &seen).map_err(|problem| {
            let objects = manifest(&case.after);
            let Case { config, rendering, .. } = &case;
            TestCaseError::fail(format!("{problem}\n{rendering:?}, {config:?}\nobjects.yml:\n{objects}"))
        })
    };
    let few = || {
        let [faults, changes] = [&*seen.faults, &seen.changes].map(|count| count.load(Ordering::Relaxed));
        faults < 50 || changes < 50
    };
    let result = Random::cases(5).prove(&(cases(), steps()), test, || few().then(|| format!("{seen:?}")));
    println!("{seen:?}");
    if let Err(error) = result {
        panic!("{error}");
    }
}
