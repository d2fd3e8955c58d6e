"""The field's nine kinds of prompt, in our own words."""

MTP_BENCH_PROMPTS = {
    "code_python": "Write a Python function that merges two sorted lists into one sorted list, with a docstring and a "
    "short example of how to call it.",
    "code_cpp": "Write a C++ class for a fixed-size ring buffer of integers with push, pop, empty and full methods.",
    "explain_concept": "Explain to a curious teenager how a refrigerator moves heat from a cold place to a warm one.",
    "summarize": "Summarize the following text in two sentences: The lighthouse on the northern cape was built in 1871 "
    "after three ships were lost in one winter. Its keeper lived there with his family until the light was automated "
    "in 1958. The house then stood empty for decades. In 2003 a group of volunteers restored it, and today it is a "
    "small museum that tells the story of the coast and of the people who kept the light burning.",
    "qa_factual": "Which planets of the solar system have rings, and which of them is the largest?",
    "translation": "Translate into French: The train leaves at nine in the morning, so we should have breakfast early "
    "and walk to the station together.",
    "creative_short": "Write a short story about a clockmaker who finds a clock that runs backwards.",
    "stepwise_math": "A farmer has 48 apples. She sells a quarter of them, gives 6 to her neighbour, and packs the "
    "rest into boxes of 5. How many full boxes does she have? Think step by step.",
    "long_code_review": "Review this Python code and suggest improvements:\n\n"
    "def load(path):\n    f = open(path)\n    data = f.read()\n    rows = []\n    for line in data.split('\\n'):\n"
    "        parts = line.split(',')\n        if len(parts) > 2:\n            rows.append({'name': parts[0], "
    "'age': int(parts[1]), 'city': parts[2]})\n    return rows\n\n"
    "def average_age(rows):\n    total = 0\n    for i in range(len(rows)):\n        total = total + rows[i]['age']\n"
    "    return total / len(rows)\n\n"
    "def by_city(rows):\n    result = {}\n    for r in rows:\n        if r['city'] in result:\n"
    "            result[r['city']].append(r)\n        else:\n            result[r['city']] = [r]\n    return result\n\n"
    "rows = load('people.csv')\nprint(average_age(rows))\nprint(by_city(rows))\n",
}
