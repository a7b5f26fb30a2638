//! Captured steps, of which those that were launched longest ago leave first.

use std::collections::HashMap;
use std::hash::Hash;

use crate::driver::Graph;

/// How much is kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct CapturedLimits {
    /// Steps, seen once or captured.
    pub(super) n_max: usize,
    /// Device memory of those that are captured.
    pub(super) n_bytes_max: u64,
}

/// What is kept of a step: an executable graph, outside of tests.
pub(super) trait Executable {
    /// Device memory that it takes.
    fn n_bytes(&self) -> u64;
}

impl Executable for Graph {
    fn n_bytes(&self) -> u64 {
        Graph::n_bytes(self)
    }
}

/// How often a kind of step was met. It is captured when it comes the second time: the first launch of a kernel may have
/// to load it. One that could not be captured is launched kernel by kernel from then on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Met {
    Never,
    Once,
    Captured,
    Refused,
}

/// Captured steps by kind.
#[derive(Debug)]
pub(super) struct Captured<K, G> {
    steps: HashMap<K, Step<G>>,
    n_launches: u64,
    n_bytes: u64,
    limits: CapturedLimits,
}

#[derive(Debug)]
struct Step<G> {
    graph: Option<G>,
    is_refused: bool,
    /// Which of all launches was its last.
    last_launch: u64,
}

impl<K: Copy + Eq + Hash, G: Executable> Captured<K, G> {
    pub(super) fn new(limits: CapturedLimits) -> Self {
        Self { steps: HashMap::new(), n_launches: 0, n_bytes: 0, limits }
    }

    /// Notes that a step of this kind is launched; returns how it was met before.
    pub(super) fn launch(&mut self, kind: K) -> Met {
        self.n_launches += 1;
        let Some(step) = self.steps.get_mut(&kind) else {
            if self.steps.len() >= self.limits.n_max {
                self.remove_oldest();
            }
            self.steps.insert(kind, Step { graph: None, is_refused: false, last_launch: self.n_launches });
            return Met::Never;
        };
        step.last_launch = self.n_launches;
        match (&step.graph, step.is_refused) {
            (_, true) => Met::Refused,
            (Some(_), false) => Met::Captured,
            (None, false) => Met::Once,
        }
    }

    /// The graph of a kind that was [captured](Met::Captured).
    pub(super) fn graph(&self, kind: &K) -> Option<&G> {
        self.steps.get(kind)?.graph.as_ref()
    }

    /// Keeps the graph of a kind that was launched just now, and lets others go that there is no room for.
    pub(super) fn keep(&mut self, kind: K, graph: G) {
        self.n_bytes += graph.n_bytes();
        let step = Step { graph: Some(graph), is_refused: false, last_launch: self.n_launches };
        let before = self.steps.insert(kind, step);
        self.n_bytes -= before.and_then(|step| step.graph).map_or(0, |graph| graph.n_bytes());
        while self.n_bytes > self.limits.n_bytes_max && self.remove_oldest_graph() {}
    }

    /// Notes that no graph runs a kind that was launched just now.
    pub(super) fn refuse(&mut self, kind: K) {
        self.remove(kind);
        self.steps.insert(kind, Step { graph: None, is_refused: true, last_launch: self.n_launches });
    }

    /// Gives back the memory of the graph that was launched longest ago; false when there is none but that of the latest
    /// launch.
    pub(super) fn remove_oldest_graph(&mut self) -> bool {
        let graphs = self.steps.iter().filter(|(_, step)| step.graph.is_some());
        let older = graphs.filter(|(_, step)| step.last_launch < self.n_launches);
        let Some((&kind, _)) = older.min_by_key(|(_, step)| step.last_launch) else { return false };
        self.remove(kind);
        true
    }

    /// Device memory of all graphs.
    pub(super) fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Kinds of steps that are known.
    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    fn remove_oldest(&mut self) {
        if let Some((&kind, _)) = self.steps.iter().min_by_key(|(_, step)| step.last_launch) {
            self.remove(kind);
        }
    }

    /// Forgets a kind, and its graph.
    pub(super) fn remove(&mut self, kind: K) {
        let removed = self.steps.remove(&kind).and_then(|step| step.graph);
        self.n_bytes -= removed.map_or(0, |graph| graph.n_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Executable for u64 {
        fn n_bytes(&self) -> u64 {
            *self
        }
    }

    fn captured(n_max: usize, n_bytes_max: u64) -> Captured<char, u64> {
        Captured::new(CapturedLimits { n_max, n_bytes_max })
    }

    /// Launches a step as the steps do: captured when it comes the second time.
    fn launch(captured: &mut Captured<char, u64>, kind: char, n_bytes: u64) -> Met {
        let met = captured.launch(kind);
        if met == Met::Once {
            captured.keep(kind, n_bytes);
        }
        met
    }

    #[test]
    fn the_least_recently_launched_leaves_alone() {
        let mut captured = captured(3, 100);
        for kind in "abcabc".chars() {
            launch(&mut captured, kind, 10);
        }
        assert_eq!((captured.len(), captured.n_bytes()), (3, 30));
        assert_eq!(launch(&mut captured, 'a', 10), Met::Captured);
        // There is no room for a fourth: of the three, b was launched longest ago.
        assert_eq!(launch(&mut captured, 'd', 10), Met::Never);
        assert_eq!((captured.len(), captured.n_bytes()), (3, 20));
        assert!(captured.graph(&'b').is_none());
        for kind in "acd".chars() {
            assert_ne!(launch(&mut captured, kind, 10), Met::Never, "{kind}");
        }
        assert_eq!(captured.n_bytes(), 30);
    }

    #[test]
    fn memory_is_bounded() {
        let mut captured = captured(100, 25);
        for kind in "aabbcc".chars() {
            launch(&mut captured, kind, 10);
        }
        assert_eq!(captured.n_bytes(), 20, "a went for c");
        assert_eq!(captured.graph(&'a'), None);
        // One that is too large for the rest takes everything, and stays until another comes.
        launch(&mut captured, 'd', 40);
        launch(&mut captured, 'd', 40);
        assert_eq!((captured.n_bytes(), captured.graph(&'d')), (40, Some(&40)));
        launch(&mut captured, 'b', 10);
        launch(&mut captured, 'b', 10);
        assert_eq!((captured.n_bytes(), captured.graph(&'d')), (10, None));
    }

    #[test]
    fn when_memory_is_short_one_graph_goes_at_a_time() {
        let mut captured = captured(100, 1000);
        for kind in "aabbc".chars() {
            launch(&mut captured, kind, 10);
        }
        assert!(captured.remove_oldest_graph());
        assert_eq!((captured.graph(&'a'), captured.graph(&'b')), (None, Some(&10)));
        assert!(captured.remove_oldest_graph());
        assert!(!captured.remove_oldest_graph());
        assert_eq!(captured.n_bytes(), 0);
    }

    #[test]
    fn what_was_refused_stays_refused() {
        let mut captured = captured(2, 100);
        for kind in "aab".chars() {
            launch(&mut captured, kind, 10);
        }
        assert_eq!(captured.launch('b'), Met::Once);
        captured.refuse('b');
        // A graph that was made can be refused later.
        assert_eq!(captured.launch('a'), Met::Captured);
        captured.refuse('a');
        assert_eq!((captured.n_bytes(), captured.graph(&'a')), (0, None));
        for kind in "abab".chars() {
            assert_eq!(launch(&mut captured, kind, 10), Met::Refused, "{kind}");
        }
        assert!(!captured.remove_oldest_graph());
        assert_eq!(captured.launch('b'), Met::Refused, "only graphs are given back");
    }

    /// More kinds than there is room for, over and over: what is launched often stays.
    #[test]
    fn a_frequent_step_is_captured_once() {
        let mut captured = captured(4, 1000);
        let mut n_captures = 0;
        for round in 0..1000u32 {
            let rare = char::from(b'a' + (round % 20) as u8);
            launch(&mut captured, rare, 1);
            n_captures += usize::from(captured.launch('Z') == Met::Once);
            if captured.graph(&'Z').is_none() && round > 0 {
                captured.keep('Z', 1);
            }
        }
        assert_eq!(n_captures, 1);
        assert!(captured.len() <= 4);
    }
}
