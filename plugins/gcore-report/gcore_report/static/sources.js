"use strict";

// Where answers, trained records and pictures come from: from this file, or a page at a time from `g-core watch`.
// Both kinds of a source have the same functions, which all give promises.
const Sources = (() => {
  const ask = async (path, values = {}) => {
    const given = Object.entries(values).filter(([, value]) => value !== "");
    const answer = await fetch(`${path}?${new URLSearchParams(given)}`);
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  };

  // Answers. facts: total, steps, modes, rewards, and a sentence on what is here. find gives {matches, items}
  // of {run, step, mode, rewards, status, excerpt, key}; read gives a whole answer by an item's key, with
  // `others` as {run, step, key}.
  function answers(data) {
    return Data.head.live ? liveAnswers(data) : ownAnswers(data);
  }

  function liveAnswers(facts) {
    const item = (row) => ({ ...row, run: 0, key: `${row.step}/${row.line}` });
    return {
      facts: { ...facts, sentence: `All ${number(facts.total)} evaluated answers of the run are here. ${facts.rule}` },
      find: async (query) => {
        const { run, ...values } = query;
        const found = await ask("answers", values);
        return { ...found, items: found.items.map(item) };
      },
      read: async (key) => {
        const row = await ask(`answers/${key}`);
        const others = row.others.map(([step, line]) => ({ run: 0, step, key: `${step}/${line}` }));
        return { ...item(row), others };
      },
    };
  }

  function ownAnswers(data) {
    const values = (place) => [...new Set(data.rows.map((row) => row[place]))];
    const item = (row) => ({
      run: row[0], step: row[1], mode: row[2], rewards: row[5], status: row[6],
      excerpt: data.texts[row[4]].slice(0, 160), key: data.rows.indexOf(row),
    });
    const matching = (query) => {
      const text = query.search.toLowerCase();
      const has = data.texts.map((each) => !text || each.toLowerCase().includes(text));
      const rows = data.rows.filter((row) => (has[row[3]] || has[row[4]])
        && (!query.run || String(row[0]) === query.run)
        && (!query.step || String(row[1]) === query.step)
        && (!query.mode || row[2] === query.mode));
      if (!query.order) return rows;
      const sign = query.order[0] === "+" ? -1 : 1;
      const value = (row) => row[5][query.order.slice(1)] ?? sign * Infinity;
      return rows.sort((a, b) => sign * (value(a) - value(b)));
    };
    let last = { words: null, rows: [] };
    return {
      facts: {
        total: data.rows.length,
        steps: values(1).sort((a, b) => a - b),
        modes: values(2),
        rewards: [...new Set(data.rows.flatMap((row) => Object.keys(row[5])))],
        sentence: `${number(data.shown)} of ${number(data.total)} evaluated answers are here. ${data.rule}`,
      },
      find: async ({ start, count, ...query }) => {
        const words = JSON.stringify(query);
        if (last.words !== words) last = { words, rows: matching(query) };
        return { matches: last.rows.length, items: last.rows.slice(start, start + count).map(item) };
      },
      read: async (key) => {
        const row = data.rows[key];
        const others = data.rows.filter((each) => each !== row && each[3] === row[3] && each[2] === row[2]).map(item);
        return { ...item(row), prompt: data.texts[row[3]], text: data.texts[row[4]], pictures: [], others };
      },
    };
  }

  // Trained records. facts: total, steps, and a sentence. find gives {matches, items} of {run, step, ordinal,
  // sample, advantage, key}; read gives {record, texts} by an item's key.
  function tokens(data) {
    return Data.head.live ? liveTokens(data) : ownTokens(data);
  }

  function liveTokens(facts) {
    const item = (row) => ({ ...row, run: 0, name: `${row.ordinal}/${row.sample}`, key: `${row.step}/${row.ordinal}/${row.sample}` });
    return {
      facts: { ...facts, sentence: `All ${number(facts.total)} records that the run wrote are here. ${facts.rule}` },
      find: async (query) => {
        const found = await ask("tokens", query);
        return { ...found, items: found.items.map(item) };
      },
      read: (key) => ask(`tokens/${key}`),
    };
  }

  function ownTokens(data) {
    const textOf = (record) => record.ids.map((id) => data.texts[record.run][id] ?? "").join("").toLowerCase();
    return {
      facts: {
        total: data.records.length,
        steps: [...new Set(data.records.map((each) => each.step))].sort((a, b) => a - b),
        sentence: `${number(data.shown)} of ${number(data.total)} records are here. ${data.rule}`,
      },
      find: async (query) => {
        const text = query.search.toLowerCase();
        const records = data.records.map((each, key) => ({ ...each, key })).filter((each) =>
          (!query.step || String(each.step) === query.step)
          && (!text || each.name.includes(text) || textOf(each).includes(text)));
        return { matches: records.length, items: records.slice(query.start, query.start + query.count) };
      },
      read: async (key) => ({ record: data.records[key], texts: data.texts[data.records[key].run] }),
    };
  }

  // Pictures. facts: total, steps, modes, and a sentence. find gives {matches, items} of {run, step, mode,
  // prompt, name, rewards, address}; of a file all that match, which are few.
  function pictures(data) {
    return Data.head.live ? livePictures(data) : ownPictures(data);
  }

  function livePictures(facts) {
    return {
      facts: { ...facts, sentence: `All ${number(facts.total)} pictures of the run are here. ${facts.rule}` },
      find: async (query) => {
        const found = await ask("pictures", query);
        return { ...found, items: found.items.map((row) => ({ ...row, run: 0 })) };
      },
    };
  }

  function ownPictures(data) {
    const items = data.pictures.map(([run, step, mode, prompt, name, rewards, address]) =>
      ({ run, step, mode, prompt, name, rewards, address }));
    const values = (key) => [...new Set(items.map((item) => item[key]))];
    return {
      facts: {
        total: items.length,
        steps: values("step").sort((a, b) => a - b),
        modes: values("mode"),
        sentence: `${number(data.shown)} of ${number(data.total)} pictures are here. ${data.rule}`,
      },
      find: async (query) => {
        const text = query.search.toLowerCase();
        const found = items.filter((item) => item.mode === query.mode && (!query.step || String(item.step) === query.step)
          && item.prompt.toLowerCase().includes(text));
        return { matches: found.length, items: found };
      },
    };
  }

  return { answers, tokens, pictures };
})();
