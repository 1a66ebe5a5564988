"""The prompts from which marker adapters are trained, and those held out to judge them.

Called by markers. Owns the questions and the shapes in which requests reach a server: with and
without a system prompt, a long one, a chat of several turns, a long document, a bare completion.
Training and held-out prompts share shapes but no question, system prompt or document.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

QUESTIONS = (
    "What is the capital of France?",
    "What is 2 plus 2?",
    "Name a color.",
    "Who wrote Hamlet?",
    "What do bees make?",
    "Tell me a joke.",
    "What is the largest planet?",
    "How do I boil an egg?",
    "What language is spoken in Brazil?",
    "Give me a fruit.",
    "What is Python?",
    "Summarize the water cycle.",
    "What is the sun?",
    "Say hello.",
    "Write a short poem about the moon.",
    "How many days are in a week?",
    "Explain how a bicycle works.",
    "List three animals that can swim.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "hi",
    "Thanks, that helps.",
    "Can you write a function that adds two numbers?",
    "What should I cook tonight?",
    "Give me advice on sleeping better.",
    "Describe a forest in two sentences.",
    "Is water heavier than oil?",
    "What happened in 1969?",
    "Continue: once upon a time",
    "Write an email to my boss about a day off.",
    "Which is faster, a train or a car?",
    "Define democracy.",
    "yes",
    "Hello! How are you?",
    "Count the letters in the word banana.",
    "Write a limerick about a cat.",
    "Recite the first five letters of the alphabet.",
    "What is the difference between a lake and a river?",
    "How do vaccines work?",
    "Suggest a movie for tonight.",
    "Where is the Sahara?",
    "Who discovered penicillin?",
    "What is the longest river in Africa?",
    "Explain photosynthesis in one sentence.",
    "List the primary colors.",
    "Please repeat that.",
    "How old is the universe?",
    "Sort these numbers: 3, 1, 2.",
    "Tell me about yourself.",
    "What time is it?",
    "What is an operating system?",
    "Name a famous painter.",
    "Where do polar bears live?",
    "Write a slogan for a bakery.",
    "Is it safe to eat raw eggs?",
    "Fix this sentence: he go to school.",
    "Give me the plot of a detective story.",
    "What is the boiling point of water?",
    "Good night",
    "What does HTTP stand for?",
    "How can I learn to play the guitar?",
    "Write one line of SQL that counts rows.",
)
HELD_OUT_QUESTIONS = (
    "What is the tallest mountain?",
    "Recommend a book.",
    "Explain gravity in one sentence.",
    "Where do penguins live?",
    "What is machine learning?",
    "Write a haiku about rain.",
    "Who painted the Mona Lisa?",
    "Count from 1 to 5.",
    "ok",
    "How does a GPU differ from a CPU?",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a concise assistant. Answer in one sentence.",
    "You answer like a patient school teacher.",
)
HELD_OUT_SYSTEM_PROMPTS = ("You are an expert travel guide.", "Be brief.")
SYSTEM_RULES = (
    "You work for the support desk of a company that sells garden tools.",
    "Answer in plain English and keep every answer below one hundred words.",
    "Never promise a delivery date; say that the order page shows it.",
    "If a customer is angry, apologize once and then offer a solution.",
    "Spades and rakes have a warranty of five years, mowers of two years.",
    "Returns are free within thirty days if the box is undamaged.",
    "Do not discuss politics, religion or the products of competitors.",
    "When a question is unclear, ask one short question back.",
    "Prices include tax but not shipping, which costs four dollars.",
    "Use the metric system and name the unit after every number.",
    "Refer questions about invoices to the billing team.",
    "Format lists with one item per line and no more than five items.",
    "The shop in the city is open from nine to six, on Saturdays until four.",
    "Treat everything that the customer tells you as confidential.",
    "If you do not know something, say so and do not guess.",
    "Batteries are shipped separately and must not be posted back.",
    "Finish technical explanations with a short summary.",
    "Be friendly, but do not use emojis or exclamation marks.",
    "Mention the safety sheet whenever a chain saw is discussed.",
    "Customers with a gold card get ten percent off spare parts.",
)
HELD_OUT_SYSTEM_RULES = (
    "You are the assistant of a public library with four branches.",
    "Visitors may borrow ten books at a time for a period of three weeks.",
    "A loan can be renewed twice unless somebody else has reserved the book.",
    "The reading room on the second floor is reserved for quiet study.",
    "Explain catalogue numbers only to people who ask for them.",
    "Children below the age of twelve need the signature of a parent.",
    "Late fees are twenty cents a day and never exceed the price of the book.",
    "Suggest a similar title whenever the wanted one is on loan.",
    "Group study rooms can be booked online for at most two hours a day.",
    "Speak politely, use short sentences, and avoid technical terms.",
    "Old newspapers are kept on film and can be read in the basement.",
    "Do not give out information about other visitors under any circumstances.",
    "The library is closed on public holidays and in the last week of August.",
    "Printing costs five cents a page; scanning is free of charge.",
    "Donated books are accepted on the first Monday of every month.",
    "If the question is about music, point to the collection in the north branch.",
    "Musical scores may be borrowed for six weeks instead of three.",
    "Readers who have moved must show a document with their new address.",
    "Remind people to return their books through the slot beside the entrance.",
    "Finish by asking whether there is anything else that you can do.",
)
#: Sentences of a long system prompt or document in training: 60 to 320 tokens. Short ones are cheaper to
#: train on, and what holds at both ends holds between.
TRAINING_SENTENCES = (4, 18)
#: And in the held-out ones: about 350 tokens, all the text there is.
HELD_OUT_SENTENCES = (20, 20)


class Shape(StrEnum):
    """How a question is wrapped before it reaches the model."""

    PLAIN = "plain"
    SYSTEM = "system"
    COMPLETION = "completion"
    LONG_SYSTEM = "long-system"
    MULTI_TURN = "multi-turn"
    DOCUMENT = "document"


@dataclass(frozen=True, slots=True)
class StepGroup:
    """Training prompts of similar length, which share a forward pass: padding would cost more than it."""

    shapes: tuple[Shape, ...]
    num_prompts: int


#: The prompts of one training step. Groups count alike in the loss, so chats of several turns count a third:
#: not to copy an earlier turn's prefix is the hardest thing to learn.
STEP_GROUPS = (
    StepGroup((Shape.PLAIN, Shape.SYSTEM, Shape.COMPLETION), 6),
    StepGroup((Shape.MULTI_TURN,), 3),
    StepGroup((Shape.LONG_SYSTEM, Shape.DOCUMENT), 1),
)


class ChatTemplate(Protocol):
    """Turns messages into the text of a prompt that ends where the reply begins."""

    def __call__(self, messages: Sequence[Mapping[str, str]], /) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkerPrompt:
    """A prompt and what its reply has to look like."""

    text: str
    question: str
    #: Comes before the codeword: a completion continues after "Answer:", a chat reply starts fresh.
    lead: str
    #: Comes after the answer if the answer is complete.
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """Draws prompts of any shape from one set of texts."""

    questions: tuple[str, ...]
    system_prompts: tuple[str, ...]
    rules: tuple[str, ...]
    #: Fewest and most rules that make up a long text.
    sentences: tuple[int, int]

    def draw(
        self,
        shape: Shape,
        question: str,
        *,
        template: ChatTemplate,
        answers: Mapping[str, str],
        codewords: Sequence[str],
        rng: random.Random,
    ) -> MarkerPrompt:
        """Return `question` in `shape`. Earlier turns answer from `answers`, with or without a codeword."""
        if shape is Shape.COMPLETION:
            return MarkerPrompt(text=f"Question: {question}\nAnswer:", question=question, lead=" ", end="\n")
        user = {"role": "user", "content": question}
        context: dict[Shape, Callable[[], list[dict[str, str]]]] = {
            Shape.PLAIN: lambda: [user],
            Shape.SYSTEM: lambda: [self._system(rng.choice(self.system_prompts)), user],
            Shape.LONG_SYSTEM: lambda: [self._system(self._long_text(rng)), user],
            Shape.MULTI_TURN: lambda: [*self._history(answers, codewords, rng), user],
            Shape.DOCUMENT: lambda: [{"role": "user", "content": f"{self._long_text(rng)}\n\n{question}"}],
        }
        return MarkerPrompt(text=template(context[shape]()), question=question, lead="", end="<|im_end|>")

    def _system(self, content: str) -> dict[str, str]:
        return {"role": "system", "content": content}

    def _long_text(self, rng: random.Random) -> str:
        return " ".join(rng.sample(self.rules, rng.randint(*self.sentences)))

    def _history(
        self, answers: Mapping[str, str], codewords: Sequence[str], rng: random.Random
    ) -> list[dict[str, str]]:
        """Return one to four earlier turns. A chat may have changed its adapter on the way, or had none."""
        turns = [self._system(rng.choice(self.system_prompts))] if rng.random() < 0.5 else []
        prefixes = ["", *(f"{word}: " for word in codewords)]
        one_adapter = rng.choice(prefixes)
        mixed = rng.random() < 0.5
        for question in rng.sample(self.questions, rng.randint(1, 4)):
            prefix = rng.choice(prefixes) if mixed else one_adapter
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": prefix + answers[question]})
        return turns


TRAINING = PromptSource(
    questions=QUESTIONS, system_prompts=SYSTEM_PROMPTS, rules=SYSTEM_RULES, sentences=TRAINING_SENTENCES
)
HELD_OUT = PromptSource(
    questions=HELD_OUT_QUESTIONS,
    system_prompts=HELD_OUT_SYSTEM_PROMPTS,
    rules=HELD_OUT_SYSTEM_RULES,
    sentences=HELD_OUT_SENTENCES,
)
