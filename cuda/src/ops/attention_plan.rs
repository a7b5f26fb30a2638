//! The lists of shares of a step.
//!
//! Layers may differ in their windows, and with them in the pages that a row attends to: each window has its own lists,
//! which all layers of that window use.

use super::attention::{Cuttings, Form, N_FORMS, PAGE_LEN};
use super::cascade::{self, Alike};
use super::shares::{ListSize, RowSpan, ShareList, Tile};
use crate::blas::bucket;

/// What attention works through in a step; kept from step to step for its memory.
#[derive(Debug)]
pub struct AttentionPlan {
    /// Those of the model's layers, each once.
    windows: Vec<Option<usize>>,
    lists: Vec<[ShareList; N_FORMS]>,
    tiles: [Vec<Tile>; N_FORMS],
    /// Those of [`Form::Own`], with the places of their results.
    own: Vec<(Tile, u16)>,
}

/// The most that the lists of any window have, by [`Form`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanSize(pub [ListSize; N_FORMS]);

impl AttentionPlan {
    /// For a model whose layers have these windows.
    #[must_use]
    pub fn new(windows: &[Option<usize>]) -> Self {
        let windows = distinct(windows);
        let lists = windows.iter().map(|_| Default::default()).collect();
        Self { windows, lists, tiles: Default::default(), own: Vec::new() }
    }

    /// Plans the rows of a step, all windows of it.
    pub fn plan(&mut self, rows: &[RowSpan], cuttings: &Cuttings) {
        for (&window, lists) in self.windows.iter().zip(&mut self.lists) {
            self.tiles.iter_mut().for_each(Vec::clear);
            self.own.clear();
            let mut rest = rows;
            while let [row, behind @ ..] = rest {
                let shared = &mut self.tiles[Form::Shared as usize];
                let alike = Alike::first_of(rest, window, cuttings, shared.len());
                if let Some(alike) = alike {
                    alike.tiles(cuttings, shared, &mut self.own);
                    rest = &rest[alike.rows.len()..];
                    continue;
                }
                if row.n_tokens > 0 {
                    let form = if row.has_holes { Form::Holed } else { cuttings.form(row.n_tokens) };
                    let tile_tokens = cuttings.of(form).tile_tokens;
                    row.tiles(tile_tokens, window, PAGE_LEN, &mut self.tiles[form as usize]);
                }
                rest = behind;
            }
            if cuttings.are_many(self.tiles[Form::Single as usize].len()) {
                self.tiles.swap(Form::Single as usize, Form::Many as usize);
            }
            for form in Form::ALL {
                match &self.tiles[form as usize][..] {
                    [] => lists[form as usize].clear(),
                    tiles => lists[form as usize].plan(tiles, cuttings.of(form)),
                }
            }
            lists[Form::Shared as usize].leave_apart();
            lists[Form::Own as usize].plan_apart(&self.own);
        }
    }

    /// The list of a form in the layers of a window.
    #[must_use]
    pub fn list(&self, window_idx: usize, form: Form) -> &ShareList {
        &self.lists[window_idx][form as usize]
    }

    /// How many windows there are.
    #[must_use]
    pub fn n_windows(&self) -> usize {
        self.windows.len()
    }

    /// The longest of each form's lists.
    #[must_use]
    pub fn size(&self) -> PlanSize {
        PlanSize(Form::ALL.map(|form| {
            let sizes = self.lists.iter().map(|lists| lists[form as usize].size());
            sizes.fold(ListSize::NONE, ListSize::max).of(form)
        }))
    }
}

/// Each window once, in the order of the layers.
#[must_use]
pub fn distinct(windows: &[Option<usize>]) -> Vec<Option<usize>> {
    let mut found = Vec::new();
    for &window in windows {
        if !found.contains(&window) {
            found.push(window);
        }
    }
    found
}

impl PlanSize {
    /// The most that comes of `n_tokens` tokens, however they are cut into rows.
    #[must_use]
    pub fn most(n_tokens: usize, cuttings: &Cuttings) -> Self {
        Self(Form::ALL.map(|form| match (form, cuttings.tiles) {
            (Form::Few | Form::Prompt | Form::Shared | Form::Own, None) => ListSize::NONE,
            (Form::Many, _) if cuttings.many.is_none() => ListSize::NONE,
            (Form::Shared, Some(_)) => cascade::shared_most(n_tokens, cuttings),
            (Form::Own, Some(_)) => cascade::own_most(n_tokens),
            // A tile has a token at least.
            _ => ListSize::most(n_tokens, cuttings.of(form)).of(form),
        }))
    }

    /// Somewhat longer lists, of so few sizes that launches captured for them serve many steps of up to `n_tokens`
    /// tokens. Workers without work cost little while all of them are resident together.
    #[must_use]
    pub fn bucketed(&self, n_tokens: usize, cuttings: &Cuttings) -> Self {
        let most = Self::most(n_tokens, cuttings);
        Self(Form::ALL.map(|form| {
            let (size, most) = (self.0[form as usize], most.0[form as usize]);
            if size.n_workers == 0 {
                return ListSize::NONE;
            }
            let n_resident = cuttings.of(form).n_workers;
            let n_workers = match size.n_workers <= n_resident {
                true => size.n_workers.next_power_of_two().min(n_resident),
                false => bucket(size.n_workers),
            };
            let n_cuts = if size.n_cuts == 0 { 0 } else { size.n_cuts.next_power_of_two().min(most.n_cuts) };
            ListSize { n_shares: most.n_shares, n_workers: n_workers.min(most.n_workers), n_cuts }
        }))
    }
}

impl ListSize {
    /// Cut tiles are listed where a launch of its own sums them.
    fn of(self, form: Form) -> Self {
        if form.sums_apart() { self } else { Self { n_cuts: 0, ..self } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::shares::Cutting;

    fn cutting(tile_tokens: usize) -> Cutting {
        Cutting { tile_tokens, n_workers: 33, quantum_pages: 8 }
    }

    fn row(token: usize, n_tokens: usize, position: usize) -> RowSpan {
        RowSpan { token, n_tokens, position, entries: 100 * token, n_pages_alike: 0, has_holes: false }
    }

    fn tokens_of(plan: &AttentionPlan, window_idx: usize, form: Form) -> Vec<u32> {
        let mut tokens: Vec<u32> =
            plan.list(window_idx, form).shares.iter().map(|share| share.token).collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }

    #[test]
    fn rows_go_to_their_forms_in_every_window() {
        let cuttings = Cuttings {
            single: cutting(2),
            tiles: Some([cutting(16), cutting(32)]),
            n_single_tokens_max: 2,
            holed: cutting(2),
            many: None,
        };
        let mut plan = AttentionPlan::new(&[None, Some(64), None, Some(64)]);
        let rows = [row(0, 1, 999), row(1, 2, 500), row(3, 9, 40), row(12, 100, 0), row(112, 0, 5)];
        plan.plan(&rows, &cuttings);
        assert_eq!(plan.n_windows(), 2);
        let tokens = |window_idx, form| tokens_of(&plan, window_idx, form);
        for window_idx in 0..2 {
            assert_eq!(tokens(window_idx, Form::Single), [0, 1]);
            assert_eq!(tokens(window_idx, Form::Few), [3]);
            assert_eq!(tokens(window_idx, Form::Prompt), [12, 44, 76, 108]);
        }
        let pages = |window_idx| {
            let shares = &plan.list(window_idx, Form::Single).shares;
            shares.iter().filter(|share| share.token == 0).map(|s| s.page_end - s.page_begin).sum::<u32>()
        };
        assert_eq!((pages(0), pages(1)), (63, 5), "a window's pages and no more");
        let (size, most) = (plan.size(), PlanSize::most(112, &cuttings));
        assert_eq!(size.0[Form::Holed as usize], ListSize::NONE);
        for (size, most) in size.0[..3].iter().zip(most.0) {
            assert!(size.n_shares > 0 && size.n_shares <= most.n_shares && size.n_cuts <= most.n_cuts);
        }
        for (form, (exact, bucketed)) in size.0.iter().zip(size.bucketed(128, &cuttings).0).enumerate() {
            assert!(
                exact.n_workers <= bucketed.n_workers && bucketed.n_workers <= bucketed.n_shares,
                "{form}"
            );
            assert!(exact.n_shares <= bucketed.n_shares && exact.n_cuts <= bucketed.n_cuts, "{form}");
        }
        plan.plan(&rows[..1], &cuttings);
        assert_eq!(plan.size().0[1..], [ListSize::NONE; 6], "nothing is left of the step before");
        // Whatever its length, a row among holes has a form of its own.
        let holed = [
            row(0, 1, 99),
            RowSpan { has_holes: true, ..row(1, 1, 50) },
            RowSpan { has_holes: true, ..row(2, 40, 9) },
        ];
        plan.plan(&holed, &cuttings);
        for window_idx in 0..2 {
            assert_eq!(tokens_of(&plan, window_idx, Form::Single), [0]);
            assert_eq!(
                tokens_of(&plan, window_idx, Form::Holed),
                (1..42).filter(|token| *token == 1 || token % 2 == 0).collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn without_tiles_every_token_is_single() {
        let cuttings = Cuttings {
            single: cutting(1),
            tiles: None,
            n_single_tokens_max: 1,
            holed: cutting(1),
            many: None,
        };
        let mut plan = AttentionPlan::new(&[None]);
        plan.plan(&[row(0, 40, 0)], &cuttings);
        let shares = &plan.list(0, Form::Single).shares;
        assert_eq!(shares.iter().map(|share| u32::from(share.n_tokens)).max(), Some(1));
        assert_eq!(plan.size().0[1..], [ListSize::NONE; 6]);
        let most = PlanSize::most(40, &cuttings).0;
        assert_eq!((&most[1..5], most[Form::Many as usize]), (&[ListSize::NONE; 4][..], ListSize::NONE));
    }

    #[test]
    fn many_rows_are_a_form_of_their_own() {
        let many = Some(Cutting { n_workers: 66, quantum_pages: 4, ..cutting(2) });
        let cuttings =
            Cuttings { single: cutting(2), tiles: None, n_single_tokens_max: 2, holed: cutting(2), many };
        let mut plan = AttentionPlan::new(&[None]);
        for (n_rows, form, other) in
            [(99, Form::Single, Form::Many), (100, Form::Many, Form::Single), (99, Form::Single, Form::Many)]
        {
            let rows: Vec<_> = (0..n_rows).map(|idx| row(idx, 1, 100 + idx)).collect();
            plan.plan(&rows, &cuttings);
            assert_eq!(tokens_of(&plan, 0, form), (0..n_rows as u32).collect::<Vec<_>>());
            assert_eq!(plan.size().0[other as usize], ListSize::NONE);
            let (exact, most) =
                (plan.size().0[form as usize], PlanSize::most(n_rows, &cuttings).0[form as usize]);
            assert!(exact.n_shares <= most.n_shares && exact.n_workers <= most.n_workers);
        }
    }
}
